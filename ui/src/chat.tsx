/** Talk to an engine. Every answer is a branch: fork from it, page through its siblings, lay two side by side. */
import { useSignal, useSignalEffect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import type { Json } from "./api";
import { type Engine, engines, STATES } from "./live";
import { announce, CopyAs, dataUrl, dropping, Fault, Twice, Written } from "./parts";
import {
  askAfter,
  askAgain,
  begin,
  bodyOf,
  type Conversation,
  change,
  children,
  conversationOf,
  conversations,
  endOf,
  forget,
  type Message,
  type Part,
  path,
  type Side,
  stop,
  type Turn,
  textOf,
  turnOf,
} from "./talk";
import { count, many, milliseconds, reuseOf } from "./words";

export const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/** The engines that can be asked. */
export function talkers(): Engine[] {
  return (engines.value ?? []).filter((engine) => engine.kind === "generate");
}

export function Chat({ id }: { id: string }) {
  const place = conversationOf(id);
  return (
    <>
      <Aside current={place} />
      <section class="talk" aria-label="Conversation">
        {place ? <Thread place={place} key={place.id} /> : <Empty />}
      </section>
    </>
  );
}

function Empty() {
  return (
    <div class="branch">
      <div class="empty">
        <h1>Ask something</h1>
        <p>
          Every answer is kept as a context. The next question starts from it instead of computing it again,
          and so does every fork. Under each answer stands what was reused.
        </p>
        <Readiness />
      </div>
      <Composer place={undefined} parent={null} side="tip" busy={null} />
    </div>
  );
}

/** Say what there is to ask, where that is not plain. */
function Readiness() {
  const found = talkers();
  if (engines.value === null || found.some((engine) => ["ready", "unloaded"].includes(engine.state)))
    return null;
  if (found.length === 0)
    return <p>No engine here generates text. Add one to the settings, and start the gateway again.</p>;
  return (
    <p>
      No engine is ready: {found.map((engine) => `${engine.name} is ${STATES[engine.state]}`).join(", ")}. See{" "}
      <a href="#/engines">Engines</a>.
    </p>
  );
}

function Aside({ current }: { current: Conversation | undefined }) {
  const list = conversations.value;
  return (
    <aside class="conversations" aria-label="Conversations">
      {(current || list.length > 0) && (
        <a class="button wide" href="#/chat">
          New conversation
        </a>
      )}
      {list.length > 0 && (
        <details open={matchMedia("(min-width: 60rem)").matches}>
          <summary>{many(list.length, "conversation")}</summary>
          <ul class="plain">
            {list.map((one) => (
              <li key={one.id}>
                <a href={`#/chat/${one.id}`} aria-current={one === current ? "true" : undefined}>
                  {one.title}
                </a>
                {one === current && <Outline place={one} />}
              </li>
            ))}
          </ul>
        </details>
      )}
      {current && (
        <Twice
          name="Forget this conversation"
          ask="Yes, forget it"
          act={() => {
            forget(current.id);
            location.hash = "#/chat";
          }}
        />
      )}
    </aside>
  );
}

/** The tree of a conversation that has forks: one line a turn, indented where branches part. */
function Outline({ place }: { place: Conversation }) {
  const forked = place.turns.some((id) => children(place, turnOf(id).peek().parent).length > 1);
  if (!forked) return null;
  const shown = new Set([...path(place.tip), ...path(place.beside)]);
  const rows: { id: string; depth: number }[] = [];
  const walk = (parent: string | null, depth: number) => {
    const below = children(place, parent);
    for (const id of below) {
      const deeper = depth + (below.length > 1 ? 1 : 0);
      rows.push({ id, depth: Math.min(deeper, 6) });
      walk(id, deeper);
    }
  };
  walk(null, 0);
  return (
    <ul class="plain outline" aria-label="Branches">
      {rows.map(({ id, depth }) => (
        <li key={id}>
          <button
            type="button"
            class={`quiet depth-${depth}`}
            aria-current={shown.has(id) ? "true" : undefined}
            onClick={() => change(place.id, { tip: endOf(place, id) })}
          >
            {label(turnOf(id).value)}
          </button>
        </li>
      ))}
    </ul>
  );
}

function label(turn: Turn): string {
  return turn.question.map(textOf).join(" ").trim().slice(0, 80) || "Picture";
}

function Thread({ place }: { place: Conversation }) {
  const main = path(place.tip);
  const other = place.beside === null ? null : path(place.beside);
  const common = other ? main.filter((id, index) => other[index] === id) : main;
  const asked = place.turns.length;
  useEffect(() => scrollTo(0, document.body.scrollHeight), [asked]);
  useSignalEffect(() => {
    const tip = conversationOf(place.id)?.tip ?? null;
    if (tip !== null && turnOf(tip).value) stayAtTheEnd();
  });
  if (!other) {
    return (
      <div class="branch">
        <Beginning place={place} />
        {main.map((id) => (
          <TurnView key={id} id={id} place={place} side="tip" />
        ))}
        <ComposerAt place={place} side="tip" />
      </div>
    );
  }
  const rest = (ids: string[]) => ids.slice(common.length);
  return (
    <div class="forked">
      <div class="branch">
        <Beginning place={place} />
        {common.map((id) => (
          <TurnView key={id} id={id} place={place} side="tip" />
        ))}
      </div>
      <div class="sides">
        {(["tip", "beside"] as const).map((side, index) => (
          <section key={side} class="branch" aria-label={index ? "Right branch" : "Left branch"}>
            <div class="row spread">
              <h2>{index ? "Right branch" : "Left branch"}</h2>
              <button
                type="button"
                class="quiet"
                onClick={() =>
                  change(place.id, index ? { beside: null } : { tip: place.beside, beside: null })
                }
              >
                {index ? "Close the right one" : "Close the left one"}
              </button>
            </div>
            {rest(index ? other : main).map((id) => (
              <TurnView key={id} id={id} place={place} side={side} />
            ))}
            <ComposerAt place={place} side={side} />
          </section>
        ))}
      </div>
    </div>
  );
}

/** Keep the end of a growing answer in sight, unless one has scrolled away from it. */
function stayAtTheEnd() {
  const { scrollHeight, clientHeight, scrollTop } = document.documentElement;
  if (scrollHeight - clientHeight - scrollTop > 160) return;
  requestAnimationFrame(() => scrollTo(0, document.documentElement.scrollHeight));
}

function Beginning({ place }: { place: Conversation }) {
  if (!place.base) return <h1 class="hidden">{place.title}</h1>;
  return (
    <div class="beginning">
      <h1 class="hidden">{place.title}</h1>
      <p>
        It starts from the context <a href={`#/contexts/${place.base.id}`}>{place.base.label}</a> of{" "}
        {place.base.model}. What you ask is added to it.
      </p>
    </div>
  );
}

function TurnView({ id, place, side }: { id: string; place: Conversation; side: Side }) {
  const turn = turnOf(id).value;
  const siblings = children(place, turn.parent);
  const number = path(id).length;
  const state = turn.state;
  const was = useRef(state);
  useEffect(() => {
    if (was.current !== state && state === "done") announce(`${turn.engine} has answered.`);
    was.current = state;
  }, [state, turn.engine]);
  return (
    <article class="turn" aria-label={`Question ${number}`}>
      <Question messages={turn.question} />
      <div class="answer" aria-busy={state === "streaming" || state === "waiting"}>
        <div class="row spread head">
          <h2>
            {turn.engine}
            {state === "waiting" && <span class="working"> is reading…</span>}
            {state === "streaming" && <span class="working"> is answering…</span>}
          </h2>
          {siblings.length > 1 && <Pager place={place} siblings={siblings} id={id} side={side} />}
        </div>
        {turn.thought && (
          <details class="thought">
            <summary>Thoughts</summary>
            <Written text={turn.thought} />
          </details>
        )}
        <Written text={turn.answer} />
        {turn.calls.map((call, index) => (
          <div class="call" key={index}>
            <h3>
              Calls <code>{call.name}</code>
            </h3>
            <pre tabIndex={0}>
              <code>{pretty(call.arguments)}</code>
            </pre>
          </div>
        ))}
        {(state === "waiting" || state === "streaming") && <Lost engine={turn.engine} />}
        {turn.finish === "stopped" && (
          <p class="note">You stopped it here. What follows starts from these words.</p>
        )}
        {turn.finish === "length" && (
          <p class="note">
            It ended at {many(turn.usage?.completion_tokens ?? 0, "token")}, the most that was asked for
            {turn.cutTo === null
              ? "; see Options below."
              : `: its context has room for no more than ${count(turn.cutTo)}.`}
          </p>
        )}
        {turn.fault && (
          <Fault fault={turn.comesBack ? { ...turn.fault, advice: "" } : turn.fault}>
            {turn.comesBack ? (
              <div class="row">
                <span>It is asked again by itself once {turn.engine} is back.</span>
                <button type="button" class="quiet" onClick={() => stop(id)}>
                  Do not ask again
                </button>
              </div>
            ) : (
              <button type="button" onClick={() => askAgain(place.id, turn, turn.engine, side)}>
                Ask again
              </button>
            )}
          </Fault>
        )}
        {turn.usage && <Reused turn={turn} />}
        {state !== "waiting" && state !== "streaming" && (
          <Acts turn={turn} place={place} side={side} siblings={siblings} />
        )}
      </div>
    </article>
  );
}

/** Say that an engine under way is not ready: the gateway may go on with the answer by itself. */
function Lost({ engine }: { engine: string }) {
  const found = engines.value?.find((one) => one.models.includes(engine));
  if (!found || found.state === "ready") return null;
  return (
    <p class="note">
      {engine} is {STATES[found.state]}. The answer goes on from here if the gateway can.
    </p>
  );
}

function Question({ messages }: { messages: Message[] }) {
  return (
    <>
      {messages.map((message, index) => {
        const pictures =
          typeof message.content === "string"
            ? []
            : message.content.filter((part) => part.type === "image_url");
        return (
          <div class={`question ${message.role}`} key={index}>
            <span class="who">{message.role === "tool" ? "Result" : "You"}</span>
            {pictures.map((part, place) =>
              part.image_url.url ? (
                <img key={place} src={part.image_url.url} alt={`What you sent, number ${place + 1}`} />
              ) : (
                <p class="note" key={place}>
                  A picture (the page was loaded again since; the context still has it)
                </p>
              ),
            )}
            <Written text={textOf(message)} />
          </div>
        );
      })}
    </>
  );
}

function Pager({
  place,
  siblings,
  id,
  side,
}: {
  place: Conversation;
  siblings: string[];
  id: string;
  side: Side;
}) {
  const at = siblings.indexOf(id);
  const go = (step: number) => {
    const next = siblings[at + step];
    if (next) change(place.id, { [side]: endOf(place, next) });
  };
  return (
    <fieldset class="pager">
      <legend class="hidden">Branches here</legend>
      <button
        type="button"
        class="quiet"
        aria-label="Branch before"
        disabled={at === 0}
        onClick={() => go(-1)}
      >
        ‹
      </button>
      <span>
        {at + 1} of {siblings.length}
      </span>
      <button
        type="button"
        class="quiet"
        aria-label="Next branch"
        disabled={at === siblings.length - 1}
        onClick={() => go(1)}
      >
        ›
      </button>
    </fieldset>
  );
}

function Acts({
  turn,
  place,
  side,
  siblings,
}: {
  turn: Turn;
  place: Conversation;
  side: Side;
  siblings: string[];
}) {
  const tip = place[side];
  const other = siblings.filter((id) => id !== turn.id).at(-1);
  return (
    <div class="row acts">
      {turn.state !== "refused" && tip !== turn.id && (
        <button
          type="button"
          class="quiet"
          onClick={() => {
            change(place.id, { [side]: turn.id });
            announce("Your next question is a new branch after this answer.");
            document.getElementById(`ask-${side}`)?.focus();
          }}
        >
          Fork from here
        </button>
      )}
      {!turn.fault && (
        <button type="button" class="quiet" onClick={() => askAgain(place.id, turn, turn.engine, side)}>
          Ask again
        </button>
      )}
      {other && place.beside === null && (
        <button
          type="button"
          class="quiet"
          onClick={() => change(place.id, { tip: endOf(place, turn.id), beside: endOf(place, other) })}
        >
          Side by side
        </button>
      )}
      {turn.saved && turn.saved.state !== "failed" && (
        <a class="button quiet" href={`#/contexts/${turn.saved.id}`}>
          Its context
        </a>
      )}
      <CopyAs
        title={`Question ${path(turn.id).length}`}
        call={() => ({ method: "POST", route: "/v1/chat/completions", body: bodyOf(place, turn) })}
      />
    </div>
  );
}

/** What was reused for an answer: a bar, a line, and all that the gateway said of it. */
function Reused({ turn }: { turn: Turn }) {
  if (!turn.usage) return null;
  const reuse = reuseOf(turn.usage, turn.source, turn.sent.how);
  const share = (tokens: number) => ({ flexGrow: String(tokens) });
  return (
    <details class="reused">
      <summary>
        <span class="bar" aria-hidden="true">
          <span class="loaded" style={share(reuse.loaded)} />
          <span class="moved" style={share(reuse.moved)} />
          <span class="resident" style={share(reuse.resident)} />
          <span class="computed" style={share(reuse.computed)} />
        </span>
        <span>
          <strong>{reuse.headline}.</strong> {reuse.why} <span class="more">Details</span>
        </span>
      </summary>
      <dl>
        <Row name="Loaded from the store" value={count(reuse.loaded)} class="loaded" />
        {reuse.moved > 0 && <Row name="Moved to a new place" value={count(reuse.moved)} class="moved" />}
        <Row name="Still in the engine" value={count(reuse.resident)} class="resident" />
        <Row name="Computed" value={count(reuse.computed)} class="computed" />
        <Row name="Answer" value={many(turn.usage.completion_tokens ?? 0, "token")} />
        {turn.firstMs !== null && <Row name="First word after" value={milliseconds(turn.firstMs)} />}
        {turn.totalMs !== null && <Row name="Whole answer after" value={milliseconds(turn.totalMs)} />}
        {turn.source?.load_ms ? <Row name="The load took" value={milliseconds(turn.source.load_ms)} /> : null}
        {turn.source?.saved_prefill_ms ? (
          <Row name="Computing saved" value={milliseconds(turn.source.saved_prefill_ms)} />
        ) : null}
        {turn.refusal && <Row name="The context was refused" value={turn.refusal} />}
        {turn.source && <Row name="Started from" value={turn.source.id} />}
        {turn.source && (
          <Row name="Outcome" value={[turn.source.outcome, turn.source.reason].filter(Boolean).join(", ")} />
        )}
        {turn.source && <Row name="Exact" value={turn.source.exact === false ? "no" : "yes"} />}
        {turn.saved && (
          <Row name="Saved as" value={turn.saved.state === "failed" ? "not saved" : turn.saved.id} />
        )}
        {turn.cutTo !== null && <Row name="max_tokens cut to" value={count(turn.cutTo)} />}
      </dl>
    </details>
  );
}

function Row({ name, value, class: kind = "" }: { name: string; value: string; class?: string }) {
  return (
    <div>
      <dt class={kind}>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** The composer of a side: after a call of tools it asks for their results. */
function ComposerAt({ place, side }: { place: Conversation; side: Side }) {
  const tip = place[side];
  const last = tip === null ? null : turnOf(tip).value;
  const busy = last && (last.state === "waiting" || last.state === "streaming") ? last.id : null;
  if (last?.state === "done" && last.calls.length)
    return <Results place={place} turn={last} side={side} key={last.id} />;
  // After a question without any answer one asks where that one was asked.
  const empty = last?.state === "cut" && !last.answer && !last.calls.length;
  const parent = last && (empty || last.state === "refused") ? last.parent : tip;
  return <Composer place={place} parent={parent} side={side} busy={busy} />;
}

function Results({ place, turn, side }: { place: Conversation; turn: Turn; side: Side }) {
  const texts = useSignal(turn.calls.map(() => ""));
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        const question = turn.calls.map(
          (call, index): Message => ({
            role: "tool",
            tool_call_id: call.id,
            content: texts.value[index] ?? "",
          }),
        );
        askAfter(place.id, turn.id, question, turn.engine, side);
      }}
    >
      {turn.calls.map((call, index) => (
        <label class="stack" key={index}>
          <span>
            What <code>{call.name}</code> returns
          </span>
          <textarea
            rows={2}
            value={texts.value[index]}
            onInput={(event) => {
              const text = event.currentTarget.value;
              texts.value = texts.value.map((old, at) => (at === index ? text : old));
            }}
          />
        </label>
      ))}
      <div class="row">
        <button type="submit" class="primary">
          Send the results
        </button>
      </div>
    </form>
  );
}

function formName(place: Conversation | undefined, side: Side): string {
  if (!place || place.beside === null) return "Ask";
  return side === "tip" ? "Ask in the left branch" : "Ask in the right branch";
}

interface ComposerProps {
  place: Conversation | undefined;
  parent: string | null;
  side: Side;
  busy: string | null;
}

function Composer({ place, parent, side, busy }: ComposerProps) {
  const text = useSignal("");
  const pictures = useSignal<{ name: string; url: string }[]>([]);
  const refusal = useSignal("");
  const over = useSignal(false);
  const open = useSignal(false);
  const chosen = useSignal("");
  const settings = useSignal(place?.settings ?? { system: "", maxTokens: 512, temperature: null, tools: [] });
  const file = useRef<HTMLInputElement>(null);
  const found = talkers();
  const before = parent === null ? (place?.base?.model ?? "") : turnOf(parent).peek().engine;
  const engine =
    found.find((one) => one.name === chosen.value) ??
    found.find((one) => one.models.includes(before)) ??
    found.find((one) => one.state === "ready") ??
    found[0];
  const forks = place && parent !== null && children(place, parent).length > 0;

  async function take(files: File[]) {
    refusal.value = "";
    if (files.length && engine && !engine.can.includes("vision")) {
      const others = found.filter((one) => one.can.includes("vision")).map((one) => one.name);
      const instead = others.length ? `Choose ${others.join(" or ")}.` : "No engine here does.";
      refusal.value = `${engine.name} takes no pictures. ${instead}`;
      return;
    }
    for (const each of files) {
      if (PICTURES.includes(each.type)) {
        pictures.value = [...pictures.value, { name: each.name, url: await dataUrl(each) }];
      } else refusal.value = `${each.name} is no PNG, JPEG, WebP or GIF.`;
    }
  }

  function send(event?: Event) {
    event?.preventDefault();
    if (busy || !engine || (!text.value.trim() && !pictures.value.length)) return;
    const at = place ?? begin();
    if (settings.value !== at.settings) change(at.id, { settings: settings.value });
    const parts: Part[] = pictures.value.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    if (text.value.trim()) parts.push({ type: "text", text: text.value });
    askAfter(
      at.id,
      parent,
      [{ role: "user", content: pictures.value.length ? parts : text.value }],
      engine.name,
      side,
    );
    text.value = "";
    pictures.value = [];
    refusal.value = "";
    if (!place) location.hash = `#/chat/${at.id}`;
  }

  return (
    <form
      class={`composer${over.value ? " over" : ""}`}
      onSubmit={send}
      {...dropping(over, take)}
      aria-label={formName(place, side)}
    >
      {forks && <p class="note">This starts a new branch.</p>}
      {pictures.value.length > 0 && (
        <ul class="plain pictures">
          {pictures.value.map((picture, index) => (
            <li key={picture.url}>
              <img src={picture.url} alt={picture.name} />
              <button
                type="button"
                class="quiet"
                aria-label={`Leave out ${picture.name}`}
                onClick={() => {
                  pictures.value = pictures.value.filter((_, at) => at !== index);
                }}
              >
                ×
              </button>
            </li>
          ))}
        </ul>
      )}
      <label class="hidden" for={`ask-${side}`}>
        Your question
      </label>
      <textarea
        id={`ask-${side}`}
        rows={Math.min(10, Math.max(2, text.value.split("\n").length))}
        placeholder={
          parent === null ? "Ask something. Drop a picture here, where the engine takes them." : "Ask on"
        }
        value={text}
        onInput={(event) => {
          text.value = event.currentTarget.value;
        }}
        onPaste={(event) => {
          const files = [...(event.clipboardData?.files ?? [])];
          if (files.length) take(files);
        }}
        onKeyDown={(event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
          if (event.key === "Escape" && busy) stop(busy);
        }}
      />
      {refusal.value && <Fault fault={{ message: refusal.value, advice: "" }} />}
      <div class="row">
        <label>
          <span class="hidden">Engine</span>
          <select
            aria-label="Engine"
            value={engine?.name ?? ""}
            onChange={(event) => {
              chosen.value = event.currentTarget.value;
              refusal.value = "";
            }}
          >
            {found.length === 0 && <option value="">no engine</option>}
            {found.map((one) => (
              <option key={one.name} value={one.name}>
                {one.name}
                {one.state === "ready" ? "" : ` (${STATES[one.state]})`}
              </option>
            ))}
          </select>
        </label>
        {engine?.can.includes("vision") && (
          <>
            <input
              ref={file}
              hidden
              type="file"
              aria-label="Pictures"
              accept={PICTURES.join(",")}
              multiple
              onChange={(event) => {
                take([...(event.currentTarget.files ?? [])]);
                event.currentTarget.value = "";
              }}
            />
            <button type="button" onClick={() => file.current?.click()}>
              Add a picture
            </button>
          </>
        )}
        <button
          type="button"
          class="quiet"
          aria-expanded={open.value}
          onClick={() => {
            open.value = !open.value;
          }}
        >
          Options
        </button>
        <span class="fill" />
        {busy ? (
          <button type="button" class="primary" onClick={() => stop(busy)}>
            Stop
          </button>
        ) : (
          <button type="submit" class="primary" disabled={!engine}>
            Ask
          </button>
        )}
      </div>
      {open.value && <Options settings={settings} begins={parent === null && !place?.base} />}
    </form>
  );
}

function Options({ settings, begins }: { settings: { value: Conversation["settings"] }; begins: boolean }) {
  const wrong = useSignal("");
  const set = (changes: Partial<Conversation["settings"]>) => {
    settings.value = { ...settings.value, ...changes };
  };
  const { system, maxTokens, temperature, tools } = settings.value;
  return (
    <div class="fields options">
      {begins && (
        <label class="stack wide">
          <span>What the model is told first (system message)</span>
          <textarea rows={2} value={system} onInput={(event) => set({ system: event.currentTarget.value })} />
        </label>
      )}
      <label class="stack">
        <span>Longest answer, tokens</span>
        <input
          type="number"
          min={1}
          max={1048576}
          value={maxTokens}
          onInput={(event) =>
            set({ maxTokens: Math.max(1, Math.round(Number(event.currentTarget.value) || 1)) })
          }
        />
      </label>
      <label class="stack">
        <span>Temperature (empty: the model's own)</span>
        <input
          type="number"
          min={0}
          max={2}
          step={0.1}
          value={temperature ?? ""}
          onInput={(event) => {
            const given = event.currentTarget.value;
            set({ temperature: given === "" ? null : Number(given) });
          }}
        />
      </label>
      <label class="stack wide">
        <span>Tools the model may call (a JSON list, as OpenAI's API has them)</span>
        <textarea
          rows={3}
          class="code"
          spellcheck={false}
          defaultValue={tools.length ? JSON.stringify(tools, null, 2) : ""}
          aria-invalid={wrong.value !== ""}
          onInput={(event) => {
            try {
              const given: Json = JSON.parse(event.currentTarget.value.trim() || "[]");
              if (!Array.isArray(given)) throw new Error("It must be a list: [ … ]");
              set({ tools: given });
              wrong.value = "";
            } catch (error) {
              wrong.value = error instanceof Error ? error.message : "This is no JSON.";
            }
          }}
        />
        {wrong.value && <span class="wrong">{wrong.value}. The tools before are kept.</span>}
      </label>
    </div>
  );
}
