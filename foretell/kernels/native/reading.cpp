// A head reads what the target has run, without a return to Python in between.
#include "reading.h"

#include "entry.h"
#include "layers.h"

namespace foretell {
namespace {

struct ReadRoom {
    HeadRoom layers;
    std::vector<float> taps, fused, before, kept;
};

class ReadRun {
  public:
    ReadRun(const Reader& reader, const Reading& reading, int threads, ReadRoom& room)
        : team(threads), layers(reader.head, team, room.layers), k(layers.k), r(reader), h(reader.head), a(reading),
          t(room) {
        layers.fit(std::max(a.rows, a.pairs));
    }

    void whole() {
        if (!r.pairs || !layers.reads_tokens()) fuse();  // else nothing is made of the states
        if (r.features != nullptr)
            for (int64_t row = 0; row < a.rows; ++row)
                std::memcpy(r.features + a.slots[row] * h.width, &t.fused[row * h.width], h.width * sizeof(float));
        if (!r.pairs) {
            for (int64_t i = 0; i < h.layer_count; ++i) keep(i, t.fused.data(), a.slots, a.places, a.rows);
        } else if (a.pairs > 0) {
            read_pairs();
        }
    }

  private:
    void fuse() {
        const int64_t width = r.taps * r.target_width;
        grow(t.taps, a.rows * width);
        grow(t.fused, a.rows * h.width);
        for (int64_t row = 0; row < a.rows; ++row) {
            float* const x = &t.taps[row * width];
            for (int64_t tap = 0; tap < r.taps; ++tap) {
                float* const part = x + tap * r.target_width;
                std::memcpy(part, a.states[row] + r.columns[tap], r.target_width * sizeof *part);
                if (r.target_norm != nullptr) k.norm(part, r.target_norm, r.target_eps, r.target_width, part);
                if (r.tap_norms != nullptr) k.norm(part, r.tap_norms[tap], h.eps, r.target_width, part);
            }
            if (r.all_norm != nullptr) k.norm(x, r.all_norm, h.eps, width, x);
        }
        if (r.fuse != nullptr)
            layers.linear(*r.fuse, t.taps.data(), a.rows, t.fused.data());
        else
            for (int64_t row = 0; row < a.rows; ++row)
                std::memcpy(&t.fused[row * h.width], &t.taps[row * width], h.width * sizeof(float));
        if (r.fused_norm != nullptr)
            for (int64_t row = 0; row < a.rows; ++row) {
                float* const x = &t.fused[row * h.width];
                k.norm(x, r.fused_norm, h.eps, h.width, x);
            }
    }

    void read_pairs() {
        if (!layers.reads_tokens()) find_before();
        layers.read(a.tokens, t.before.data(), a.pairs);
        const int64_t last = h.layer_count - 1;
        if (last > 0) run_pairs(last);
        keep(last, layers.reads(last, a.pairs), a.own, a.at, a.pairs);
    }

    void find_before() {
        grow(t.before, a.pairs * h.width);
        for (int64_t i = 0; i < a.pairs; ++i)
            std::memcpy(&t.before[i * h.width], r.features + a.before[i] * h.width, h.width * sizeof(float));
    }

    // Of several layers the later ones read what the earlier ones say: all that comes before is looked at. What the
    // last one says of known tokens nobody asks.
    void run_pairs(int64_t count) {
        std::vector<Seen> seen;
        layers.see(a, 0, seen);
        layers.run(seen, a.at, a.own, a.pairs, count);
    }

    // Keys and values of a layer's input, into their slots.
    void keep(int64_t index, const float* x, const int64_t* slots, const int64_t* places, int64_t rows) {
        const Layer& layer = h.layers[index];
        const int64_t size = h.kv_heads * h.head_dim;
        grow(t.kept, rows * 2 * size);
        layers.linear(*r.keeps[index], x, rows, t.kept.data());
        for (int64_t row = 0; row < rows; ++row) {
            float* const keys = &t.kept[row * 2 * size];
            const float* const turns = layer.turns + places[row] * 2 * h.head_dim;
            for (int64_t head = 0; head < h.kv_heads; ++head) {
                float* const key = keys + head * h.head_dim;
                if (layer.k_norm != nullptr) k.norm(key, layer.k_norm, h.eps, h.head_dim, key);
                k.turn(key, turns, h.head_dim, 1.0f);
            }
            std::memcpy(layer.keys + slots[row] * size, keys, size * sizeof *keys);
            std::memcpy(layer.values + slots[row] * size, keys + size, size * sizeof *keys);
        }
    }

    Team team;
    Layers layers;
    const Kernels& k;
    const Reader& r;
    const Head& h;
    const Reading& a;
    ReadRoom& t;
};

}  // namespace
}  // namespace foretell

FORETELL_API int64_t foretell_read(const foretell::Reader* reader, const foretell::Reading* reading, int threads) {
    using namespace foretell;
    return entry([&]() -> int64_t {
        ReadRun(*reader, *reading, threads, scratch<ReadRoom>()).whole();
        return 0;
    });
}
