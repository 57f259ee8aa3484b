// The KV slots that the nodes of draft trees see after their context.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "step.h"

namespace foretell {

// For each tree node the slots of its ancestors and its own, from the root down.
class TreePaths {
  public:
    explicit TreePaths(const Step& step) {
        for (int64_t i = 0; i < step.span_count; ++i)
            if (step.spans[i].nodes > 0) add(step, step.spans[i]);
    }

    const int64_t* slots() const { return slots_.data(); }
    const int64_t* firsts() const { return firsts_.data(); }  // by row

  private:
    void add(const Step& step, const Span& span) {
        firsts_.resize(step.rows);
        const int64_t first = span.first + span.rows - span.nodes;  // row of the first node
        const int64_t root = span.start + span.rows - span.nodes - 1;
        const int64_t* const parents = step.parents + span.first_parent;
        for (int64_t node = 0; node < span.nodes; ++node) {
            int64_t depth = 0;
            for (int64_t at = node; at >= 0; at = parents[at]) ++depth;
            firsts_[first + node] = int64_t(slots_.size());
            // If a node's position is not its depth, a bug of the caller, it reads wrong keys but none out of bounds.
            slots_.resize(slots_.size() + std::max(depth, step.positions[first + node] - root));
            int64_t* end = slots_.data() + firsts_[first + node] + depth;
            for (int64_t at = node; at >= 0; at = parents[at]) *--end = step.slots[first + at];
        }
    }

    std::vector<int64_t> slots_, firsts_;
};

}  // namespace foretell
