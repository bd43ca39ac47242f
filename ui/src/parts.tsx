/** What several views show: faults, copies of requests, acts that ask once more, text of others, announcements. */
import { signal, useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { type Call, LANGUAGES, type Language, written } from "./copies";

/** Said by screen readers, shown to nobody. */
export const announcement = signal("");

export function announce(text: string): void {
  announcement.value = "";
  queueMicrotask(() => {
    announcement.value = text;
  });
}

export function Fault({
  fault,
  children,
}: {
  fault: { message: string; advice: string };
  children?: ComponentChildren;
}) {
  return (
    <div class="fault" role="alert">
      <p>
        <strong>{fault.message}</strong> {fault.advice}
      </p>
      {children}
    </div>
  );
}

/** Text that a model or a tenant wrote: never markup. Fenced code stands in a box of its own. */
export function Written({ text }: { text: string }) {
  const pieces = text.split(/^```[^\n]*\n?/m);
  return (
    <div class="written">
      {pieces.map((piece, index) => {
        const shown = piece.replace(/^\n+|\n+$/g, "");
        if (!shown) return null;
        return index % 2 ? (
          <pre key={index} tabIndex={0}>
            <code>{shown}</code>
          </pre>
        ) : (
          <p key={index}>{shown}</p>
        );
      })}
    </div>
  );
}

const copying = signal<{ call: () => Call; title: string } | null>(null);

/** Opens a window with the request of a step, as curl, Python and with the OpenAI SDK. */
export function CopyAs({
  call,
  title,
  name = "Copy as…",
}: {
  call: () => Call;
  title: string;
  name?: string;
}) {
  return (
    <button
      type="button"
      class="quiet"
      aria-haspopup="dialog"
      aria-label={`${name} ${title}`}
      onClick={() => {
        copying.value = { call, title };
      }}
    >
      {name}
    </button>
  );
}

const language = signal<Language>("curl");

export function CopyWindow() {
  const window = useRef<HTMLDialogElement>(null);
  const code = useRef<HTMLPreElement>(null);
  const done = useSignal("");
  const shown = copying.value;
  useEffect(() => {
    if (shown) window.current?.showModal();
  }, [shown]);
  const text = shown ? written(shown.call(), language.value) : "";
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      done.value = "Copied.";
    } catch {
      // A page that came over plain http from another machine has no clipboard.
      if (code.current) getSelection()?.selectAllChildren(code.current);
      done.value = "Selected: copy it with Ctrl+C.";
    }
  }
  return (
    <dialog
      ref={window}
      class="copies"
      aria-labelledby="copies-title"
      onClose={() => {
        copying.value = null;
        done.value = "";
      }}
    >
      <h2 id="copies-title">{shown?.title ?? ""}</h2>
      <fieldset class="segments">
        <legend class="hidden">Written as</legend>
        {LANGUAGES.map((name) => (
          <label key={name}>
            <input
              type="radio"
              name="language"
              checked={language.value === name}
              onChange={() => {
                language.value = name;
                done.value = "";
              }}
            />
            <span>{name}</span>
          </label>
        ))}
      </fieldset>
      <section class="scroll" tabIndex={0} aria-label={`The request as ${language.value}`}>
        <pre ref={code}>
          <code>{text}</code>
        </pre>
      </section>
      <div class="row">
        <button type="button" class="primary" onClick={copy}>
          Copy
        </button>
        <button type="button" onClick={() => window.current?.close()}>
          Close
        </button>
        <span role="status">{done}</span>
      </div>
    </dialog>
  );
}

/** A button that has to be pressed twice, for what cannot be taken back. */
export function Twice({ name, ask, act }: { name: string; ask: string; act: () => void }) {
  const asked = useSignal(false);
  const first = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    if (asked.value) first.current?.focus();
  }, [asked.value]);
  if (!asked.value) {
    return (
      <button
        type="button"
        class="quiet"
        onClick={() => {
          asked.value = true;
        }}
      >
        {name}
      </button>
    );
  }
  return (
    <fieldset class="twice">
      <legend class="hidden">{ask}</legend>
      <button
        type="button"
        class="danger"
        ref={first}
        onClick={() => {
          asked.value = false;
          act();
        }}
      >
        {ask}
      </button>
      <button
        type="button"
        class="quiet"
        onClick={() => {
          asked.value = false;
        }}
      >
        Keep
      </button>
    </fieldset>
  );
}

/** Read a file as a `data:` address. */
export function dataUrl(file: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Error("the file cannot be read"));
    reader.readAsDataURL(file);
  });
}

/** What a drop zone needs: files that are dropped go to `take`. */
export function dropping(over: { value: boolean }, take: (files: File[]) => void) {
  return {
    onDragOver: (event: DragEvent) => {
      event.preventDefault();
      over.value = true;
    },
    onDragLeave: () => {
      over.value = false;
    },
    onDrop: (event: DragEvent) => {
      event.preventDefault();
      over.value = false;
      take([...(event.dataTransfer?.files ?? [])]);
    },
  };
}
