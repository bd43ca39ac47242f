/** The page: who may see it, where one is, and the five views. */
import { effect, signal } from "@preact/signals";
import { render } from "preact";
import { useEffect } from "preact/hooks";
import { access, inWords, key } from "./api";
import { Chat } from "./chat";
import { Context, Contexts } from "./contexts";
import { Engines } from "./engines";
import { KeyEntry } from "./key";
import { connected, follow, readEngines } from "./live";
import { MapView } from "./map";
import { announcement, CopyWindow, Fault } from "./parts";
import { restore } from "./talk";

const VIEWS = { chat: "Chat", contexts: "Contexts", engines: "Engines", map: "Map" } as const;

const here = signal(location.hash);
addEventListener("hashchange", () => {
  here.value = location.hash;
});

/** The name of the view and what it is to show: `#/contexts/ID`. */
function place(): [string, string] {
  const [, view = "", what = ""] = here.value.split("/");
  return [Object.hasOwn(VIEWS, view) || view === "key" ? view : "chat", what];
}

const failure = signal<unknown>(null);

/** A tab in the background follows nothing: a browser opens six connections to a host, for all its tabs. */
const seen = signal(!document.hidden);
document.addEventListener("visibilitychange", () => {
  seen.value = !document.hidden;
});

effect(() => {
  key.value; // a new key, a new stream of events
  if (!seen.value) return;
  const stopper = new AbortController();
  failure.value = null;
  readEngines()
    .catch((error) => {
      failure.value = error;
    })
    .then(async () => {
      if (access.peek() !== "refused") await follow(stopper.signal);
    });
  return () => stopper.abort();
});

function Page() {
  const [view, what] = place();
  const closed = access.value === "refused" || view === "key";
  const title = closed ? "Key" : VIEWS[view as keyof typeof VIEWS];
  useEffect(() => {
    document.title = `${title} · Baton`;
    if (!closed) document.querySelector<HTMLElement>("main")?.focus({ preventScroll: true });
  }, [title, closed]);
  return (
    <>
      <button type="button" class="skip" onClick={() => document.querySelector<HTMLElement>("main")?.focus()}>
        Skip to the content
      </button>
      <header class="top">
        <a class="brand" href="#/chat">
          Baton
        </a>
        {access.value !== "refused" && (
          <nav aria-label="Views">
            {Object.entries(VIEWS).map(([name, label]) => (
              <a key={name} href={`#/${name}`} aria-current={!closed && view === name ? "page" : undefined}>
                {label}
              </a>
            ))}
          </nav>
        )}
        <div class="aside">
          {key.value === "" && access.value === "open" && <a href="docs">API</a>}
          {(key.value !== "" || closed) && (
            <a href="#/key" aria-current={view === "key" ? "page" : undefined}>
              Key
            </a>
          )}
        </div>
      </header>
      {!connected.value && (
        <p class="banner" role="status">
          The gateway does not answer. Trying again…
        </p>
      )}
      <main id="main" tabIndex={-1} class={closed ? "key" : view}>
        {closed ? <KeyEntry /> : <View view={view} what={what} />}
      </main>
      <p class="hidden" role="status">
        {announcement}
      </p>
      <CopyWindow />
    </>
  );
}

function View({ view, what }: { view: string; what: string }) {
  if (access.value === "unknown") {
    if (failure.value === null) return <p class="loading">Asking the gateway…</p>;
    return (
      <Fault fault={inWords(failure.value)}>
        <button type="button" onClick={() => location.reload()}>
          Load again
        </button>
      </Fault>
    );
  }
  if (view === "contexts") return what ? <Context id={what} key={what} /> : <Contexts />;
  if (view === "engines") return <Engines />;
  if (view === "map") return <MapView />;
  return <Chat id={what} />;
}

restore();
const root = document.getElementById("app");
if (root) render(<Page />, root);
