/** The tenant's contexts: a list in pages, and one of them with its messages. */
import { type Signal, useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { ask, askJson, type Body, inWords } from "./api";
import { happened } from "./live";
import { announce, CopyAs, Fault, Twice, Written } from "./parts";
import { begin, type Message, type Saved } from "./talk";
import { ago, bytes, count, many, REASONS, span } from "./words";

/** A handoff as `GET /v1/handoffs` lists it. */
interface Handoff extends Saved {
  model: string;
  images: number;
  pin: boolean;
  created_at: number;
  parents: string[];
  label: string | null;
  archived: boolean;
  error: string | null;
  tier: "here" | "shared" | "archive" | null;
  uses: number;
  last_used_at: number | null;
  last_outcome: string | null;
  last_reason: string | null;
}

interface Page {
  data: Handoff[];
  has_more: boolean;
  last_id: string | null;
}

const ROWS = 50;
/** Ms after which news are read: many come at once. */
const SOON_MS = 300;
const MOST_JOINED = 16;
const TIERS = { here: "on this machine", shared: "in the shared store", archive: "in the archive" };

type Fault_ = ReturnType<typeof inWords> | null;

function named(handoff: Handoff): string {
  return handoff.label?.trim() || `Context ${handoff.id.slice(0, 8)}`;
}

function place(handoff: Handoff): string {
  if (handoff.state === "pending") return "still being saved";
  if (handoff.state === "failed") return handoff.error ?? "failed";
  return handoff.tier ? TIERS[handoff.tier] : "not stored";
}

function used(handoff: Handoff): string {
  if (!handoff.uses) return "not used yet";
  const times = ["", "used once", "used twice"][handoff.uses] ?? `used ${count(handoff.uses)} times`;
  return handoff.last_used_at ? `${times}, last ${ago(handoff.last_used_at)}` : times;
}

function why(handoff: Handoff): string {
  if (handoff.last_outcome !== "recomputed") return "";
  return `Last time it was computed again: ${REASONS[handoff.last_reason ?? ""] ?? "the gateway gave no reason."}`;
}

const route = (id: string) => `/v1/handoffs/${encodeURIComponent(id)}`;

export function Contexts() {
  const page = useSignal<Page | null>(null);
  const cursors = useSignal<string[]>([]);
  const fault = useSignal<Fault_>(null);
  const chosen = useSignal<Handoff[]>([]);
  const after = cursors.value.at(-1);

  async function read() {
    try {
      const query = after ? `&after=${encodeURIComponent(after)}` : "";
      page.value = await askJson<Page>(`/v1/handoffs?limit=${ROWS}${query}`);
      fault.value = null;
    } catch (error) {
      const told = inWords(error);
      if (after && told.code === "handoff_not_found")
        cursors.value = []; // the last one of the page before is gone
      else fault.value = told;
    }
  }

  useEffect(() => {
    read();
  }, [after]);
  const news = happened.value?.handoff && !happened.value.handoff.automatic ? happened.value.at : 0;
  const waits = useRef(0);
  useEffect(() => {
    if (!news || after || waits.current) return;
    waits.current = setTimeout(() => {
      waits.current = 0;
      read();
    }, SOON_MS);
  }, [news, after]);

  const rows = page.value?.data ?? [];
  const first = cursors.value.length * ROWS + 1;
  return (
    <>
      <div class="row spread head">
        <h1>Contexts</h1>
        <nav class="row" aria-label="Pages">
          <button
            type="button"
            disabled={!cursors.value.length}
            onClick={() => {
              cursors.value = cursors.value.slice(0, -1);
            }}
          >
            Newer
          </button>
          <span class="note" role="status">
            {rows.length ? `${count(first)}–${count(first + rows.length - 1)}` : ""}
          </span>
          <button
            type="button"
            disabled={!page.value?.has_more}
            onClick={() => {
              const last = page.value?.last_id;
              if (last) cursors.value = [...cursors.value, last];
            }}
          >
            Older
          </button>
        </nav>
      </div>
      {fault.value && <Fault fault={fault.value} />}
      <Join chosen={chosen} fault={fault} read={read} />
      {page.value && !rows.length && <Nothing />}
      {rows.length > 0 && (
        <div class="scroll">
          <table class="listed">
            <caption class="hidden">Contexts, the newest first</caption>
            <thead>
              <tr>
                <th scope="col">
                  <span class="hidden">Chosen</span>
                </th>
                <th scope="col">Context</th>
                <th scope="col">Engine</th>
                <th scope="col" class="number">
                  Tokens
                </th>
                <th scope="col" class="number">
                  KV
                </th>
                <th scope="col">Where</th>
                <th scope="col">Life left</th>
                <th scope="col">Uses</th>
                <th scope="col">
                  <span class="hidden">Acts</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {rows.map((each) => (
                <Row key={each.id} handoff={each} chosen={chosen} fault={fault} read={read} />
              ))}
            </tbody>
          </table>
        </div>
      )}
    </>
  );
}

function Nothing() {
  return (
    <div class="empty">
      <p>
        No contexts yet. <a href="#/chat">Ask something</a>: each answer is kept as one. Programs leave them
        with{" "}
        <code>
          "handoff": {"{"}"save": true{"}"}
        </code>
        .
      </p>
    </div>
  );
}

interface Shared {
  chosen: Signal<Handoff[]>;
  fault: Signal<Fault_>;
  read: () => Promise<void>;
}

function Row({ handoff, chosen, fault, read }: Shared & { handoff: Handoff }) {
  const picked = chosen.value.some((one) => one.id === handoff.id);
  const name = named(handoff);
  const left = handoff.expires_at - Date.now() / 1000;
  return (
    <tr class={handoff.state === "failed" ? "failed" : ""}>
      <td class="pick">
        <input
          type="checkbox"
          aria-label={`Choose ${name}`}
          checked={picked}
          disabled={handoff.state === "failed" || (!picked && chosen.value.length >= MOST_JOINED)}
          onChange={() => {
            chosen.value = picked
              ? chosen.value.filter((one) => one.id !== handoff.id)
              : [...chosen.value, handoff];
          }}
        />
      </td>
      <th scope="row">
        <a href={`#/contexts/${handoff.id}`}>{name}</a>
        {handoff.pin && <span class="badge">pinned</span>}
        {!handoff.exact && <span class="badge">not exact</span>}
        {handoff.images > 0 && <span class="badge">{many(handoff.images, "picture")}</span>}
        <Parents ids={handoff.parents} />
        {why(handoff) && <p class="note">{why(handoff)}</p>}
      </th>
      <td data-label="Engine">{handoff.model}</td>
      <td data-label="Tokens" class="number">
        {count(handoff.tokens)}
      </td>
      <td data-label="KV" class="number">
        {handoff.bytes ? bytes(handoff.bytes) : "–"}
      </td>
      <td data-label="Where">{place(handoff)}</td>
      <td data-label="Life left">{left > 0 ? span(left) : "over"}</td>
      <td data-label="Uses">{used(handoff)}</td>
      <td class="acts">
        <Pin handoff={handoff} fault={fault} read={read} />
      </td>
    </tr>
  );
}

function Parents({ ids }: { ids: string[] }) {
  if (!ids.length) return null;
  return (
    <p class="note">
      {ids.length > 1 ? "joins" : "continues"}{" "}
      {ids.map((id, index) => (
        <>
          {index > 0 && ", "}
          <a href={`#/contexts/${id}`}>{id.slice(0, 8)}</a>
        </>
      ))}
    </p>
  );
}

function Pin({ handoff, fault, read }: { handoff: Handoff } & Omit<Shared, "chosen">) {
  return (
    <button
      type="button"
      class="quiet"
      aria-pressed={handoff.pin}
      aria-label={`${handoff.pin ? "Unpin" : "Pin"} ${named(handoff)}`}
      disabled={handoff.state === "failed"}
      onClick={async () => {
        fault.value = await failing(ask(route(handoff.id), { method: "PATCH", body: { pin: !handoff.pin } }));
        await read();
      }}
    >
      {handoff.pin ? "Unpin" : "Pin"}
    </button>
  );
}

/** The fault of a request, or null. */
async function failing(request: Promise<unknown>): Promise<Fault_> {
  try {
    await request;
    return null;
  } catch (error) {
    return inWords(error);
  }
}

/** Join the chosen contexts into one of their own, ahead of the first question about all of them. */
function Join({ chosen, fault, read }: Shared) {
  const list = chosen.value;
  if (!list.length) return null;
  const body = joined(list);
  return (
    <fieldset class="toolbar">
      <legend class="hidden">Chosen contexts</legend>
      <span>{many(list.length, "context")} chosen</span>
      <button
        type="button"
        class="primary"
        disabled={list.length < 2}
        onClick={async () => {
          const answer = askJson<Handoff>("/v1/handoffs", { body });
          fault.value = await failing(answer);
          if (fault.value) return;
          announce("Joined. The new context is the first of the list.");
          chosen.value = [];
          await read();
        }}
      >
        Join them
      </button>
      <button
        type="button"
        class="quiet"
        onClick={() => {
          chosen.value = [];
        }}
      >
        Choose none
      </button>
      {list.length > 1 && (
        <CopyAs title="Join contexts" call={() => ({ method: "POST", route: "/v1/handoffs", body })} />
      )}
      {list.length < 2 && (
        <span class="note">Choose two or more to join them, in the order in which you choose.</span>
      )}
    </fieldset>
  );
}

function joined(list: Handoff[]): Body {
  const model = list[0]?.model ?? "";
  const label = `Join of ${list.map(named).join(", ")}`.slice(0, 200);
  const others = list.some((one) => one.model !== model);
  return { model, from: list.map((one) => one.id), label, ...(others ? { translate: true } : {}) };
}

interface Messages {
  data: (Omit<Message, "content"> & { content: string | null | { type: string; text?: string }[] })[];
  text: string | null;
  complete: boolean;
  why: string | null;
}

/** One context: what it is, what can be done with it, and what was said. */
export function Context({ id }: { id: string }) {
  const handoff = useSignal<Handoff | null>(null);
  const messages = useSignal<Messages | null>(null);
  const fault = useSignal<Fault_>(null);
  const silent = useSignal<Fault_>(null);

  async function read() {
    try {
      handoff.value = await askJson<Handoff>(route(id));
    } catch (error) {
      fault.value = inWords(error);
      return;
    }
    try {
      messages.value = await askJson<Messages>(`${route(id)}/messages`);
      silent.value = null;
    } catch (error) {
      silent.value = inWords(error);
    }
  }

  const news = happened.value?.handoff?.id === id ? happened.value.at : 0;
  useEffect(() => {
    read();
  }, [id, news]);

  const shown = handoff.value;
  return (
    <>
      <p>
        <a href="#/contexts">All contexts</a>
      </p>
      {fault.value && <Fault fault={fault.value} />}
      {shown && (
        <>
          <h1>{named(shown)}</h1>
          <Facts handoff={shown} />
          <Changes handoff={shown} fault={fault} read={read} />
          <h2>What was said</h2>
          {silent.value && <Fault fault={silent.value} />}
          {messages.value && <Said messages={messages.value} />}
        </>
      )}
    </>
  );
}

function Facts({ handoff }: { handoff: Handoff }) {
  const left = handoff.expires_at - Date.now() / 1000;
  const facts: [string, string][] = [
    ["Engine", handoff.model],
    ["Tokens", count(handoff.tokens)],
    [
      "KV",
      handoff.bytes
        ? `${bytes(handoff.bytes)}, ${place(handoff)}`
        : `${place(handoff)}: computed again when used`,
    ],
    ["Life left", left > 0 ? span(left) : "over"],
    ["Made", ago(handoff.created_at)],
    ["Uses", used(handoff)],
    ["Exact", handoff.exact ? "yes" : "no: some of its KV was moved"],
    ["Id", handoff.id],
  ];
  return (
    <>
      <dl class="facts">
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      <Parents ids={handoff.parents} />
      {why(handoff) && <p class="note">{why(handoff)}</p>}
    </>
  );
}

function Changes({ handoff, fault, read }: { handoff: Handoff } & Omit<Shared, "chosen">) {
  const label = useSignal(handoff.label ?? "");
  const act = async (method: string, body?: Body) => {
    fault.value = await failing(ask(route(handoff.id), { method, ...(body ? { body } : {}) }));
    return fault.value === null;
  };
  return (
    <div class="changes">
      <form
        class="row"
        onSubmit={async (event) => {
          event.preventDefault();
          if (await act("PATCH", { label: label.value.trim() || null })) announce("Renamed.");
          await read();
        }}
      >
        <label for="label">Label</label>
        <input
          id="label"
          maxLength={200}
          value={label}
          onInput={(event) => {
            label.value = event.currentTarget.value;
          }}
        />
        <button type="submit">Rename</button>
      </form>
      <div class="row">
        <button
          type="button"
          class="primary"
          disabled={handoff.state === "failed"}
          onClick={() => {
            const made = begin({ id: handoff.id, label: named(handoff), model: handoff.model });
            location.hash = `#/chat/${made.id}`;
          }}
        >
          Ask about it
        </button>
        <Pin handoff={handoff} fault={fault} read={read} />
        <Twice
          name="Delete"
          ask="Yes, delete it"
          act={async () => {
            if (!(await act("DELETE"))) return;
            announce("Deleted.");
            location.hash = "#/contexts";
          }}
        />
        <CopyAs
          title="Show this context"
          name="Copy “show” as…"
          call={() => ({ method: "GET", route: route(handoff.id) })}
        />
        <CopyAs
          title="Pin and name this context"
          name="Copy “change” as…"
          call={() => ({
            method: "PATCH",
            route: route(handoff.id),
            body: { pin: !handoff.pin, label: label.value || null },
          })}
        />
      </div>
    </div>
  );
}

function Said({ messages }: { messages: Messages }) {
  return (
    <div class="said">
      {!messages.complete && messages.why && <p class="note">{messages.why}</p>}
      {messages.text !== null && <Written text={messages.text} />}
      {messages.data.map((message, index) => (
        <div class={`question ${message.role}`} key={index}>
          <span class="who">{message.role}</span>
          {pictures(message.content) > 0 && <p class="note">{many(pictures(message.content), "picture")}</p>}
          <Written text={plain(message.content)} />
          {message.tool_calls?.map((call) => (
            <pre key={call.id} tabIndex={0}>
              <code>{`${call.function.name}(${call.function.arguments})`}</code>
            </pre>
          ))}
        </div>
      ))}
    </div>
  );
}

function plain(content: Messages["data"][number]["content"]): string {
  if (content === null || typeof content === "string") return content ?? "";
  return content.map((part) => part.text ?? "").join("");
}

function pictures(content: Messages["data"][number]["content"]): number {
  return Array.isArray(content) ? content.filter((part) => part.type === "image_url").length : 0;
}
