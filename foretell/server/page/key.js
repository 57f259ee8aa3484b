// The dialog that asks for a key.
import { Refused } from "./api.js";
import { part } from "./dom.js";

/** A key from the user; `wrong` says that the last one was not taken. */
export function askKey(wrong) {
  const dialog = part("key-dialog");
  const field = part("key");
  part("key-wrong").hidden = !wrong;
  field.value = "";
  dialog.showModal();
  field.focus();
  return new Promise((resolve, reject) => {
    const done = new AbortController();
    const listen = (target, event, hear) => target.addEventListener(event, hear, { signal: done.signal });
    const close = (settle) => {
      done.abort();
      dialog.close();
      field.value = "";
      settle();
    };
    const refuse = () => reject(new Refused(401, { message: "the server wants a key; ask again to give one" }));
    listen(part("key-form"), "submit", (event) => {
      event.preventDefault();
      const key = field.value.trim();
      if (key) close(() => resolve(key));
    });
    listen(part("key-cancel"), "click", () => close(refuse));
    listen(dialog, "cancel", (event) => {
      event.preventDefault();
      close(refuse);
    });
  });
}
