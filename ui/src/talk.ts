/**
 * Hold conversations as trees of turns, and ask. Each answer is saved as a context (a handoff), so that every
 * turn can be forked: what comes after it starts from there. Kept in memory, and in the tab's session storage.
 */
import { type Signal, signal } from "@preact/signals";
import { ApiError, ask, type Body, errorOf, events, inWords, type Json } from "./api";
import { back, type Engine, engines } from "./live";
import type { How, Source, Usage } from "./words";

export type Part = { type: "text"; text: string } | { type: "image_url"; image_url: { url: string } };

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface Message {
  role: "system" | "user" | "assistant" | "tool";
  content: string | Part[];
  tool_calls?: { id: string; type: "function"; function: { name: string; arguments: string } }[];
  tool_call_id?: string;
}

export interface Saved {
  id: string;
  state: "pending" | "ready" | "failed";
  tokens: number;
  bytes: number;
  expires_at: number;
  exact: boolean;
}

/** A question and its answer. */
export interface Turn {
  id: string;
  parent: string | null;
  engine: string;
  /** The messages that it adds to its parent's context. */
  question: Message[];
  answer: string;
  thought: string;
  calls: ToolCall[];
  state: "waiting" | "streaming" | "done" | "cut" | "refused";
  finish: string | null;
  fault: { message: string; advice: string; code: string } | null;
  /** Whether it is asked again by itself once its engine is back. */
  comesBack: boolean;
  attempt: number;
  saved: Saved | null;
  source: Source | null;
  usage: Usage | null;
  sent: Sent;
  /** Why the context that it was to start from was refused. */
  refusal: string | null;
  /** What `max_tokens` was cut to, by the header `X-Baton-Max-Tokens`. */
  cutTo: number | null;
  firstMs: number | null;
  totalMs: number | null;
}

/** How the request was made: from which contexts, and with which messages. */
interface Sent {
  how: How;
  from: string[];
  translate: boolean;
  keeps: boolean;
  settings: Settings;
}

export interface Settings {
  system: string;
  maxTokens: number;
  temperature: number | null;
  tools: Json[];
}

/** A context of the list from which a conversation begins. */
export interface Base {
  id: string;
  label: string;
  model: string;
}

export interface Conversation {
  id: string;
  title: string;
  base: Base | null;
  turns: string[];
  /** The last turn of the branch that is shown, and of a second one beside it. */
  tip: string | null;
  beside: string | null;
  settings: Settings;
}

export type Side = "tip" | "beside";

const STORED = "baton.conversations";
const LOST = new Set([
  "engine_restarting",
  "remote_lost",
  "shutting_down",
  "unreachable",
  "engine_unavailable",
]);
/** Refusals of a context after which the conversation itself can be sent. */
const UNUSABLE = new Set([
  "handoff_not_found",
  "handoff_images_lost",
  "handoff_incompatible",
  "handoff_template_unsupported",
]);
const ATTEMPTS = 3;

export const conversations = signal<Conversation[]>([]);
const turns = new Map<string, Signal<Turn>>();
const stoppers = new Map<string, AbortController>();

export function turnOf(id: string): Signal<Turn> {
  const found = turns.get(id);
  if (!found) throw new Error(`no turn ${id}`);
  return found;
}

export function conversationOf(id: string): Conversation | undefined {
  return conversations.value.find((one) => one.id === id);
}

function newId(): string {
  const digits = crypto.getRandomValues(new Uint8Array(8));
  return Array.from(digits, (each) => each.toString(16).padStart(2, "0")).join("");
}

export function begin(base: Base | null = null): Conversation {
  const made: Conversation = {
    id: newId(),
    title: base ? `From ${base.label}` : "New conversation",
    base,
    turns: [],
    tip: null,
    beside: null,
    settings: { system: "", maxTokens: 512, temperature: null, tools: [] },
  };
  conversations.value = [made, ...conversations.value];
  return made;
}

export function change(id: string, changes: Partial<Conversation>): void {
  conversations.value = conversations.value.map((one) => (one.id === id ? { ...one, ...changes } : one));
  keep();
}

export function forget(id: string): void {
  for (const turn of conversationOf(id)?.turns ?? []) {
    stop(turn);
    turns.delete(turn);
  }
  conversations.value = conversations.value.filter((one) => one.id !== id);
  keep();
}

/** Forget all conversations: they are the tenant's whose key was in use. */
export function forgetAll(): void {
  for (const one of conversations.value) forget(one.id);
}

/** The turns from the beginning to a tip. */
export function path(tip: string | null): string[] {
  const found: string[] = [];
  for (let id = tip; id !== null; id = turnOf(id).value.parent) found.unshift(id);
  return found;
}

export function children(conversation: Conversation, parent: string | null): string[] {
  return conversation.turns.filter((id) => turnOf(id).peek().parent === parent);
}

/** The end of a branch: from a turn always on to its newest answer. */
export function endOf(conversation: Conversation, turn: string): string {
  let end = turn;
  for (let next = children(conversation, end).at(-1); next; next = children(conversation, end).at(-1))
    end = next;
  return end;
}

/** Ask after `parent` (null: at the beginning) and show the answer as the tip of one side. */
export function askAfter(
  conversation: string,
  parent: string | null,
  question: Message[],
  engine: string,
  side: Side | null,
  attempt = 1,
): void {
  const place = conversationOf(conversation);
  if (!place) return;
  const turn = signal<Turn>({
    id: newId(),
    parent,
    engine,
    question,
    answer: "",
    thought: "",
    calls: [],
    state: "waiting",
    finish: null,
    fault: null,
    comesBack: false,
    attempt,
    saved: null,
    source: null,
    usage: null,
    sent: { how: "begins", from: [], translate: false, keeps: false, settings: place.settings },
    refusal: null,
    cutTo: null,
    firstMs: null,
    totalMs: null,
  });
  const id = turn.peek().id;
  turns.set(id, turn);
  const first = place.turns.length === 0 && !place.base ? { title: titleOf(question) } : {};
  change(conversation, { turns: [...place.turns, id], ...first, ...(side ? { [side]: id } : {}) });
  run(conversation, turn).finally(keep);
}

/** Ask a turn's question again, as a branch beside it. */
export function askAgain(
  conversation: string,
  turn: Turn,
  engine: string,
  side: Side | null,
  attempt = 1,
): void {
  askAfter(conversation, turn.parent, turn.question, engine, side, attempt);
}

export function stop(turn: string): void {
  stoppers.get(turn)?.abort();
}

export function textOf(message: Message): string {
  if (typeof message.content === "string") return message.content;
  return message.content.map((part) => (part.type === "text" ? part.text : "")).join("");
}

function titleOf(question: Message[]): string {
  const text = question.map(textOf).join(" ").replace(/\s+/g, " ").trim();
  return text.length > 60 ? `${text.slice(0, 59)}…` : text || "Picture";
}

function answerOf(turn: Turn): Message {
  const calls = turn.calls.map(({ id, name, arguments: given }) => ({
    id,
    type: "function" as const,
    function: { name, arguments: given },
  }));
  return { role: "assistant", content: turn.answer, ...(calls.length ? { tool_calls: calls } : {}) };
}

/** What a turn goes on from: the nearest saved context before it, and the messages since. */
function before(place: Conversation, turn: Turn, keeps: boolean, gone: boolean): Plan {
  const messages: Message[] = [];
  for (let id = turn.parent; id !== null; ) {
    const earlier = turnOf(id).peek();
    if (keeps && !gone && earlier.saved && earlier.saved.state !== "failed") {
      const how = messages.length ? "whole: not saved" : "from";
      return { how, from: [earlier.saved.id], translate: earlier.engine !== turn.engine, messages };
    }
    messages.unshift(...earlier.question, answerOf(earlier));
    id = earlier.parent;
  }
  if (place.base && !gone) {
    const how = messages.length ? "whole: not saved" : "from";
    return { how, from: [place.base.id], translate: place.base.model !== turn.engine, messages };
  }
  const { system } = turn.sent.settings;
  if (system) messages.unshift({ role: "system", content: system });
  const how =
    turn.parent === null ? "begins" : gone ? "whole: context refused" : "whole: engine keeps no contexts";
  return { how, from: [], translate: false, messages };
}

interface Plan {
  how: How;
  from: string[];
  translate: boolean;
  messages: Message[];
}

/** The body of a turn's request, as it was sent. */
export function bodyOf(place: Conversation, turn: Turn): Body {
  return requestOf(turn, before(place, turn, turn.sent.keeps, turn.sent.how === "whole: context refused"));
}

function requestOf(turn: Turn, plan: Plan): Body {
  const { maxTokens, temperature, tools } = turn.sent.settings;
  const handoff: Body = { save: { label: titleOf(turn.question) } };
  if (plan.from.length) handoff.from = plan.from.length === 1 ? (plan.from[0] ?? "") : plan.from;
  if (plan.translate) handoff.translate = true;
  return {
    model: turn.engine,
    messages: [...plan.messages, ...turn.question] as unknown as Json,
    max_tokens: maxTokens,
    ...(temperature === null ? {} : { temperature }),
    ...(tools.length ? { tools } : {}),
    ...(turn.sent.keeps || plan.from.length ? { handoff } : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
}

function engineNamed(name: string): Engine | undefined {
  return engines.peek()?.find((one) => one.models.includes(name));
}

async function run(conversation: string, turn: Signal<Turn>): Promise<void> {
  const stopper = new AbortController();
  const { id, engine } = turn.peek();
  stoppers.set(id, stopper);
  try {
    const keeps = engineNamed(engine)?.supports_handoffs ?? true;
    await send(conversation, turn, stopper.signal, keeps, false);
  } catch (error) {
    const begun = turn.peek().answer !== "" || turn.peek().thought !== "";
    if (stopper.signal.aborted) {
      update(turn, { state: "cut", finish: "stopped" });
      return;
    }
    const fault = inWords(error);
    const comesBack = LOST.has(fault.code) && turn.peek().attempt < ATTEMPTS;
    update(turn, { state: begun ? "cut" : "refused", fault, comesBack });
    if (comesBack) await askWhenBack(conversation, turn, stopper.signal);
  } finally {
    stoppers.delete(id);
  }
}

/** Wait for the engine, then ask again as a branch of its own; what had come of the first answer stays beside it. */
async function askWhenBack(conversation: string, turn: Signal<Turn>, stopped: AbortSignal): Promise<void> {
  const { engine, id, attempt } = turn.peek();
  const ready = await back(engine, stopped);
  update(turn, { comesBack: false });
  const place = conversationOf(conversation);
  if (!ready || !place) return;
  const side = place.tip === id ? "tip" : place.beside === id ? "beside" : null;
  askAgain(conversation, turn.peek(), engine, side, attempt + 1);
}

async function send(
  conversation: string,
  turn: Signal<Turn>,
  stopped: AbortSignal,
  keeps: boolean,
  gone: boolean,
): Promise<void> {
  const place = conversationOf(conversation);
  if (!place) return;
  const plan = before(place, turn.peek(), keeps, gone);
  update(turn, {
    sent: { ...turn.peek().sent, how: plan.how, from: plan.from, translate: plan.translate, keeps },
  });
  requirePictures(plan.messages.concat(turn.peek().question));
  const begun = performance.now();
  let response: Response;
  try {
    response = await ask("/v1/chat/completions", { body: requestOf(turn.peek(), plan), signal: stopped });
  } catch (error) {
    if (!(error instanceof ApiError) || !UNUSABLE.has(error.code)) throw error;
    if (!plan.from.length || place.base || turn.peek().parent === null) throw error;
    update(turn, { refusal: error.message });
    return send(conversation, turn, stopped, keeps, true);
  }
  const cut = response.headers.get("X-Baton-Max-Tokens");
  update(turn, { cutTo: cut === null ? null : Number(cut) });
  await receive(turn, response, begun);
}

/** Pictures are not kept over a reload of the page; without them another question would be asked. */
function requirePictures(messages: Message[]): void {
  for (const { content } of messages) {
    if (typeof content === "string") continue;
    if (content.some((part) => part.type === "image_url" && !part.image_url.url)) {
      throw new ApiError("A picture of this conversation is not in the page any more.", "picture_lost", 0);
    }
  }
}

async function receive(turn: Signal<Turn>, response: Response, begun: number): Promise<void> {
  let ended = false;
  for await (const event of events(response)) {
    if (event.data === "[DONE]") {
      ended = true;
      continue;
    }
    const chunk = JSON.parse(event.data) as Chunk;
    if (event.event === "error" || chunk.error) throw errorOf(chunk, 200);
    if (turn.peek().firstMs === null) update(turn, { firstMs: performance.now() - begun });
    update(turn, told(turn.peek(), chunk));
  }
  if (!ended) throw new ApiError("The answer ended before its end.", "unreachable", 0);
  update(turn, { state: "done", totalMs: performance.now() - begun });
}

interface Chunk {
  error?: unknown;
  usage?: Usage | null;
  handoff?: (Partial<Saved> & { source?: Source }) | null;
  choices?: {
    finish_reason?: string | null;
    delta?: {
      content?: string | null;
      reasoning?: string | null;
      reasoning_content?: string | null;
      tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
    };
  }[];
}

/** What a chunk of the stream adds to a turn. */
function told(turn: Turn, chunk: Chunk): Partial<Turn> {
  const added: Partial<Turn> = { state: "streaming" };
  if (chunk.usage) added.usage = chunk.usage;
  if (chunk.handoff) {
    added.source = chunk.handoff.source ?? null;
    if (chunk.handoff.id) added.saved = chunk.handoff as Saved;
  }
  const choice = chunk.choices?.[0];
  if (!choice) return added;
  if (choice.finish_reason) added.finish = choice.finish_reason;
  const delta = choice.delta ?? {};
  if (delta.content) added.answer = turn.answer + delta.content;
  const thought = delta.reasoning ?? delta.reasoning_content;
  if (thought) added.thought = turn.thought + thought;
  if (delta.tool_calls) {
    const calls = [...turn.calls];
    for (const call of delta.tool_calls) {
      const known = calls[call.index] ?? { id: "", name: "", arguments: "" };
      calls[call.index] = {
        id: call.id ?? known.id,
        name: known.name + (call.function?.name ?? ""),
        arguments: known.arguments + (call.function?.arguments ?? ""),
      };
    }
    added.calls = calls;
  }
  return added;
}

function update(turn: Signal<Turn>, changes: Partial<Turn>): void {
  turn.value = { ...turn.peek(), ...changes };
}

/** Write everything but pictures into the session storage; the oldest conversations go where it is full. */
function keep(): void {
  for (let kept = conversations.peek(); ; kept = kept.slice(0, -1)) {
    const ids = kept.flatMap((one) => one.turns);
    const state = { conversations: kept, turns: ids.map((id) => turnOf(id).peek()) };
    try {
      sessionStorage.setItem(STORED, JSON.stringify(state, withoutPictures));
      return;
    } catch {
      if (kept.length === 0) return;
    }
  }
}

function withoutPictures(_name: string, value: unknown): unknown {
  return typeof value === "string" && value.startsWith("data:image/") ? "" : value;
}

/** Read what the tab's session still has. A turn that was under way when the page was left is cut. */
export function restore(): void {
  try {
    const state = JSON.parse(sessionStorage.getItem(STORED) ?? "null");
    if (!state) return;
    for (const turn of state.turns as Turn[]) {
      const open = turn.state === "waiting" || turn.state === "streaming";
      const left = {
        message: "The page was left while the answer came.",
        advice: "Ask again.",
        code: "page",
      };
      turns.set(
        turn.id,
        signal({ ...turn, comesBack: false, ...(open ? { state: "cut" as const, fault: left } : {}) }),
      );
    }
    conversations.value = state.conversations;
  } catch {
    sessionStorage.removeItem(STORED);
  }
}
