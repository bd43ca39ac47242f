/** Take the key, once. It stays in this tab. */
import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { ApiError, access, enterKey, inWords, key } from "./api";
import { readEngines } from "./live";
import { Fault } from "./parts";
import { forgetAll } from "./talk";

export function KeyEntry() {
  const entered = useSignal("");
  const wrong = useSignal<{ message: string; advice: string } | null>(null);
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => field.current?.focus(), []);

  async function enter(event: Event) {
    event.preventDefault();
    const before = key.value;
    wrong.value = null;
    enterKey(entered.value.trim());
    try {
      await readEngines();
      if (before) forgetAll();
      location.hash = "#/chat";
    } catch (error) {
      wrong.value =
        error instanceof ApiError && error.status === 401
          ? {
              message: "The gateway does not know this key.",
              advice: "Look for a missing or doubled character, or ask for a new one.",
            }
          : inWords(error);
      enterKey(before);
      field.current?.focus();
      field.current?.select();
    }
  }

  const open = access.value === "open";
  if (open && !key.value) {
    return (
      <div class="card narrow">
        <h1>Key</h1>
        <p>
          This gateway asks for no key: everything is open to you. <a href="#/chat">Ask something</a>.
        </p>
      </div>
    );
  }
  return (
    <form class="card narrow" onSubmit={enter}>
      <h1>{open ? "Key" : "This gateway asks for a key"}</h1>
      {open && <p>A key is in use in this tab. Another one changes whose contexts you see.</p>}
      <label for="key">Key</label>
      <input
        id="key"
        ref={field}
        type="password"
        autocomplete="off"
        spellcheck={false}
        required
        aria-describedby="key-about"
        aria-invalid={wrong.value !== null}
        value={entered}
        onInput={(event) => {
          entered.value = event.currentTarget.value;
        }}
      />
      <p id="key-about" class="hint">
        Operators make one with <code>baton keys create NAME</code>. It stays in this tab until you close it,
        and goes to this gateway alone.
      </p>
      {wrong.value && <Fault fault={wrong.value} />}
      <div class="row">
        <button type="submit" class="primary">
          Enter
        </button>
        {open && (
          <button
            type="button"
            onClick={() => {
              forgetAll();
              enterKey("");
            }}
          >
            Forget the key and the conversations
          </button>
        )}
      </div>
    </form>
  );
}
