/**
 * Ask the gateway. The one place that knows the key, and that turns each failure into words and what to do.
 */
import { signal } from "@preact/signals";

const STORED = "baton.key";

/** The key that was entered; it lives as long as the tab and goes out as a bearer header only. */
export const key = signal(sessionStorage.getItem(STORED) ?? "");
/** Whether the gateway lets this page in: `open` with the key, or without one where it has no keys. */
export const access = signal<"unknown" | "open" | "refused">("unknown");

export function enterKey(entered: string): void {
  key.value = entered;
  if (entered) sessionStorage.setItem(STORED, entered);
  else sessionStorage.removeItem(STORED);
}

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };
export type Body = { [name: string]: Json };

/** A refusal or failure. `message` is the gateway's sentence, `advice` what a person can do about it. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly code: string,
    readonly status: number,
    readonly param: string | null = null,
    readonly retryAfter: number | null = null,
    readonly requestId: string | null = null,
  ) {
    super(message);
  }

  get advice(): string {
    return adviceFor(this.code, this.retryAfter);
  }
}

const ADVICE: Record<string, string> = {
  unreachable: "Is the gateway running, and this page's address still right? Then try again.",
  invalid_api_key: "Enter another key, or ask the operator for one.",
  not_permitted: "Ask somebody with an operator's key.",
  context_length_exceeded: "Fork from an earlier answer, or ask for fewer tokens.",
  handoff_not_found: "Its life has ended, or it was deleted. Start from another context.",
  handoff_incompatible: "Choose the engine that saved it, or one that takes it over by its text.",
  handoff_pending: "It is still being saved. Try again in a moment.",
  handoff_pins_full: "Unpin another context first.",
  handoff_images_lost: "Send the picture again in a new conversation.",
  handoff_template_unsupported: "Start a new conversation: this model cannot go on from here.",
  picture_lost: "The page was loaded again since. Start a new conversation with it.",
  image_too_large: "Make the picture smaller.",
  invalid_image: "Send a still PNG, JPEG, WebP or GIF.",
  model_not_found: "Choose an engine of the list.",
  raster_unusable: "Say below which bands the model gets, and their scale and offset.",
  raster_unsupported: "Drop a GeoTIFF.",
  raster_too_large: "Cut the scene, or ask the operator for higher limits.",
  generation_failed: "Ask again.",
  shutting_down: "Ask again once it is back.",
  engine_restarting: "It is being started again. Ask again once it is back.",
  engine_unavailable: "See Engines for why, and start it there.",
};

function adviceFor(code: string, retryAfter: number | null): string {
  const known = ADVICE[code];
  if (known) return known;
  return retryAfter === null ? "" : `Try again in ${retryAfter} s.`;
}

/** The address of a route, beside this page, so that a gateway below a path of a proxy works too. */
export function address(route: string): string {
  return new URL(route.replace(/^\//, ""), document.baseURI).href;
}

export interface Asked {
  method?: string;
  body?: Body;
  signal?: AbortSignal;
  headers?: Record<string, string>;
}

/** Send one request. Raises an ApiError for every answer that is not 2xx, and where none came. */
export async function ask(
  route: string,
  { method, body, signal, headers: more }: Asked = {},
): Promise<Response> {
  const headers = new Headers(more);
  if (key.value) headers.set("Authorization", `Bearer ${key.value}`);
  if (body) headers.set("Content-Type", "application/json");
  let response: Response;
  try {
    response = await fetch(address(route), {
      method: method ?? (body ? "POST" : "GET"),
      headers,
      body: body ? JSON.stringify(body) : null,
      signal: signal ?? null,
      credentials: "omit",
      cache: "no-store",
      redirect: "error",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw unreachable();
  }
  if (response.ok) return response;
  throw await refusal(response);
}

export async function askJson<T>(route: string, asked: Asked = {}): Promise<T> {
  return (await ask(route, asked)).json() as Promise<T>;
}

/** Send a file as the body and read the JSON answer; `sent` is told how much has gone, from 0 to 1. */
export function upload<T>(
  route: string,
  file: Blob,
  type: string,
  sent: (share: number) => void,
  stopped: AbortSignal,
): Promise<T> {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest(); // `fetch` does not tell how much of a body has gone
    request.open("POST", address(route));
    request.setRequestHeader("Content-Type", type);
    request.setRequestHeader("Accept", "application/json");
    if (key.value) request.setRequestHeader("Authorization", `Bearer ${key.value}`);
    request.upload.onprogress = (event) => sent(event.lengthComputable ? event.loaded / event.total : 0);
    request.upload.onload = () => sent(1);
    request.onload = () => {
      const { status, responseText } = request;
      if (status === 200) resolve(JSON.parse(responseText) as T);
      else reject(refused(status, responseText, request.getResponseHeader("Retry-After")));
    };
    request.onerror = () => reject(unreachable());
    request.onabort = () => reject(new ApiError("You stopped it.", "stopped", 0));
    stopped.addEventListener("abort", () => request.abort());
    request.send(file);
  });
}

export function unreachable(): ApiError {
  return new ApiError("The gateway does not answer.", "unreachable", 0);
}

async function refusal(response: Response): Promise<ApiError> {
  return refused(response.status, await response.text().catch(() => ""), response.headers.get("Retry-After"));
}

/** Make the error of an answer; one that is no error of the gateway (of a proxy, say) is told by its status. */
export function refused(status: number, text: string, retryAfter: string | null): ApiError {
  if (status === 401) access.value = "refused";
  const seconds = retryAfter === null || Number.isNaN(Number(retryAfter)) ? null : Number(retryAfter);
  try {
    return errorOf(JSON.parse(text), status, seconds);
  } catch {
    return new ApiError(`The answer was ${status} without a reason.`, "unknown", status, null, seconds);
  }
}

/** Make the error of a body of the gateway's shape: `{"error": {"message", "code", "param", ...}}`. */
export function errorOf(body: unknown, status: number, retryAfter: number | null = null): ApiError {
  const error = (body as { error: Record<string, unknown> }).error;
  const text = (name: string) => (typeof error[name] === "string" ? (error[name] as string) : null);
  return new ApiError(
    text("message") ?? "The request failed.",
    text("code") ?? "unknown",
    status,
    text("param"),
    retryAfter,
    text("request_id"),
  );
}

export interface ServerEvent {
  id: string;
  event: string;
  data: string;
}

/** Read server-sent events. `EventSource` could not send the key. Comments and blank events are left out. */
export async function* events(response: Response): AsyncGenerator<ServerEvent> {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let current: ServerEvent = { id: "", event: "message", data: "" };
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop() ?? "";
      for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
        if (line === "") {
          if (current.data) yield { ...current, data: current.data.slice(0, -1) };
          current = { id: current.id, event: "message", data: "" };
          continue;
        }
        const colon = line.indexOf(":");
        if (colon === 0) continue;
        const field = colon < 0 ? line : line.slice(0, colon);
        const text = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
        if (field === "data") current.data += `${text}\n`;
        else if (field === "event") current.event = text;
        else if (field === "id") current.id = text;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Put any thrown thing into the two sentences that the page shows. */
export function inWords(error: unknown): { message: string; advice: string; code: string } {
  if (error instanceof ApiError) return { message: error.message, advice: error.advice, code: error.code };
  const text = error instanceof Error ? error.message : String(error);
  return { message: `This page failed: ${text}`, advice: "Load the page again.", code: "page" };
}
