/** Know the engines and what happens: one list, and one stream of events for the whole page. */
import { signal } from "@preact/signals";
import { ApiError, access, ask, askJson, events } from "./api";

/** An engine as `GET /v1/engines` answers it. */
export interface Engine {
  name: string;
  models: string[];
  kind: "generate" | "pooling";
  here: boolean;
  state:
    | "starting"
    | "ready"
    | "unreachable"
    | "restarting"
    | "failed"
    | "stopping"
    | "stopped"
    | "unloaded"
    | "unloading";
  why: string | null;
  supports_handoffs: boolean;
  can: string[];
  running: number;
  waiting: number;
  tokens_per_s: number | null;
  kv_used: number | null;
  memory_bytes: number | null;
  started_at: number | null;
  restarts: number;
}

/** What `GET /v1/events` tells, as far as this page uses it. */
export interface Happening {
  type: string;
  at: number;
  handoff?: { id: string; automatic: boolean };
  engine?: string;
}

export const engines = signal<Engine[] | null>(null);
export const operator = signal(false);
/** Whether the gateway could be reached the last time. */
export const connected = signal(true);
/** The last thing that happened; views that list things read them again. */
export const happened = signal<Happening | null>(null);

/** Read the engines. Raises what `ask` raises; access and connection are noted either way. */
export async function readEngines(): Promise<void> {
  try {
    const list = await askJson<{ operator: boolean; data: Engine[] }>("/v1/engines");
    engines.value = list.data;
    operator.value = list.operator;
    access.value = "open";
    connected.value = true;
  } catch (error) {
    if (error instanceof ApiError && error.code === "unreachable") connected.value = false;
    throw error;
  }
}

const FIRST_PAUSE_MS = 1000;
const LONGEST_PAUSE_MS = 15000;

/** The id of the last event that came, where a stream goes on. */
let last = "";

/** Follow the events until `stopped`; a stream that ends is opened again where it ended. */
export async function follow(stopped: AbortSignal): Promise<void> {
  let pause = FIRST_PAUSE_MS;
  while (!stopped.aborted) {
    try {
      for await (const event of events(await openEvents(stopped))) {
        last = event.id || last;
        pause = FIRST_PAUSE_MS;
        const happening = JSON.parse(event.data) as Happening;
        if (["open", "reset", "engine.state"].includes(happening.type)) readEngines().catch(() => {});
        happened.value = happening;
      }
    } catch (error) {
      if (stopped.aborted || (error instanceof ApiError && error.status === 401)) return;
      if (error instanceof ApiError && error.code === "unreachable") connected.value = false;
    }
    await rest(pause, stopped);
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    await readEngines().catch(() => {});
  }
}

function openEvents(stopped: AbortSignal): Promise<Response> {
  return ask("/v1/events", { signal: stopped, headers: last ? { "Last-Event-ID": last } : {} });
}

export function rest(ms: number, stopped: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    stopped.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}

/** Resolves once the engine is ready, or `stopped`; whether it is ready. */
export async function back(name: string, stopped: AbortSignal): Promise<boolean> {
  while (!stopped.aborted) {
    await readEngines().catch(() => {});
    if (connected.value && engines.value?.some((one) => one.models.includes(name) && one.state === "ready"))
      return true;
    await rest(1000, stopped);
  }
  return false;
}

export const STATES: Record<Engine["state"], string> = {
  starting: "starting",
  ready: "ready",
  unreachable: "does not answer",
  restarting: "starting again",
  failed: "failed",
  stopping: "stopping",
  stopped: "stopped",
  unloaded: "loaded when asked for",
  unloading: "making room",
};
