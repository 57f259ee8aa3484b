// The API key dialog.
import { ApiError } from "./api.js";
import { part } from "./dom.js";

/** Ask the user for a key; `wrong`: the last one was rejected. */
export function askKey(wrong) {
  const dialog = part("key-dialog");
  const field = part("key");
  part("key-wrong").hidden = !wrong;
  field.value = "";
  dialog.showModal();
  field.focus();
  return new Promise((resolve, reject) => {
    const done = new AbortController();
    const listen = (target, event, handler) => target.addEventListener(event, handler, { signal: done.signal });
    const close = (finish) => {
      done.abort();
      dialog.close();
      field.value = "";
      finish();
    };
    const cancel = () => reject(new ApiError(401, { message: "the server requires an API key; send again to enter one" }));
    listen(part("key-form"), "submit", (event) => {
      event.preventDefault();
      const key = field.value.trim();
      if (key) close(() => resolve(key));
    });
    listen(part("key-cancel"), "click", () => close(cancel));
    listen(dialog, "cancel", (event) => {
      event.preventDefault();
      close(cancel);
    });
  });
}
