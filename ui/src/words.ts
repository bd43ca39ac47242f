/** Write numbers, times and the fate of KV in words. */

const whole = new Intl.NumberFormat("en-GB");

export function count(number: number): string {
  return whole.format(number);
}

/** "1 token", "1,204 tokens". */
export function many(number: number, word: string, words = `${word}s`): string {
  return `${count(number)} ${number === 1 ? word : words}`;
}

export function bytes(number: number): string {
  let left = number;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (left < 1024 || unit === "GiB")
      return `${left < 10 && unit !== "B" ? left.toFixed(1) : Math.round(left)} ${unit}`;
    left /= 1024;
  }
  return "";
}

export function milliseconds(ms: number): string {
  return ms < 1000 ? `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

/** The largest unit of a span: "40 s", "12 min", "3 h", "2 d". */
export function span(seconds: number): string {
  const size = Math.abs(seconds);
  if (size < 90) return `${Math.round(size)} s`;
  if (size < 90 * 60) return `${Math.round(size / 60)} min`;
  if (size < 36 * 3600) return `${Math.round(size / 3600)} h`;
  return `${Math.round(size / 86400)} d`;
}

export function ago(since: number, now = Date.now() / 1000): string {
  return now - since < 5 ? "just now" : `${span(now - since)} ago`;
}

/** `handoff.source` of an answer, as docs/reference/handoff.md has it. */
export interface Source {
  id: string;
  tokens: number;
  outcome: "loaded" | "resident" | "recomputed" | "blended" | "translated" | "rosetta";
  exact?: boolean;
  reason?: string | null;
  loaded_tokens?: number;
  moved_tokens?: number;
  resident_tokens?: number;
  load_ms?: number;
  estimated_load_ms?: number | null;
  estimated_prefill_ms?: number | null;
  saved_prefill_ms?: number | null;
  shared_tokens?: number;
  from_model?: string;
  computed_tokens?: number;
  parts?: {
    id: string;
    tokens: number;
    loaded_tokens: number;
    moved_tokens: number;
    recomputed_tokens: number;
  }[];
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens?: number;
  prompt_tokens_details?: { cached_tokens?: number | null } | null;
}

/** What became of an answer's prompt: how many tokens from where, and a sentence or two about it. */
export interface Reuse {
  prompt: number;
  loaded: number;
  moved: number;
  resident: number;
  computed: number;
  headline: string;
  why: string;
}

/** Why stored KV was not used, by `handoff.source.reason`; shown beside a context too. */
export const REASONS: Record<string, string> = {
  kv_gone: "its KV is not in the store any more. Pin a context whose KV should stay.",
  kv_corrupt: "its stored KV failed verification and was thrown away.",
  kv_incompatible: "its KV is of other weights, types or settings than this engine's.",
  store_unreadable: "the store could not be read. The gateway's log says more.",
  load_failed: "the load failed midway. The gateway's log says more.",
  slower_to_load: "computing was expected to be faster than loading.",
  not_used: "none of its KV fitted the beginning of this prompt.",
};

/** Tell what was reused for an answer. */
export function reuseOf(usage: Usage, source: Source | null, asked: How): Reuse {
  const prompt = usage.prompt_tokens;
  const lost = source?.reason === "load_failed"; // the engine's count of cached tokens still has them then
  const loaded = lost ? 0 : (source?.loaded_tokens ?? 0);
  const moved = lost ? 0 : (source?.moved_tokens ?? 0);
  const cached = lost ? 0 : (usage.prompt_tokens_details?.cached_tokens ?? 0);
  const resident = Math.max(source?.resident_tokens ?? 0, cached - loaded - moved);
  const reused = Math.min(prompt, loaded + moved + resident);
  const shown = { prompt, loaded, moved, resident, computed: prompt - reused };
  const headline =
    reused > 0
      ? `${count(reused)} of ${many(prompt, "prompt token")} not computed`
      : `All ${many(prompt, "prompt token")} computed`;
  return { ...shown, headline, why: whyOf(shown, source, asked) };
}

/** How the prompt was sent: from a context, or as a whole conversation, and why. */
export type How =
  | "begins"
  | "from"
  | "whole: engine keeps no contexts"
  | "whole: context refused"
  | "whole: not saved";

function whyOf(shown: Omit<Reuse, "headline" | "why">, source: Source | null, asked: How): string {
  const parts: string[] = [];
  if (asked === "whole: engine keeps no contexts") {
    parts.push("This engine keeps no contexts, so the whole conversation was sent again.");
  } else if (asked === "whole: context refused") {
    parts.push("It could not start from the saved context, so the whole conversation was sent again.");
  } else if (asked === "whole: not saved") {
    parts.push(
      "The answer before was not saved, so the conversation since the last saved one was sent again.",
    );
  }
  if (source) parts.push(...aboutSource(shown, source));
  else if (shown.resident)
    parts.push(`The engine still had ${many(shown.resident, "token")} in its prefix cache.`);
  else if (asked === "begins") parts.push("It begins a conversation: there was nothing to start from.");
  return parts.join(" ");
}

function aboutSource(shown: Omit<Reuse, "headline" | "why">, source: Source): string[] {
  const parts: string[] = [];
  const saved = source.saved_prefill_ms ? `, which saved about ${milliseconds(source.saved_prefill_ms)}` : "";
  if (source.outcome === "recomputed") {
    parts.push(`Nothing was loaded: ${REASONS[source.reason ?? ""] ?? "the gateway gave no reason."}`);
    if (source.reason === "slower_to_load" && source.estimated_load_ms && source.estimated_prefill_ms) {
      parts.push(
        `Expected were ${milliseconds(source.estimated_load_ms)} to load, ` +
          `${milliseconds(source.estimated_prefill_ms)} to compute.`,
      );
    }
  } else if (source.outcome === "rosetta") {
    parts.push("One vector stands for the other model's context.");
  } else if (source.outcome === "translated") {
    parts.push(
      `Taken over from ${source.from_model ?? "another model"} by its text, which was computed once.`,
    );
  } else {
    if (shown.loaded) {
      const took = source.load_ms ? ` in ${milliseconds(source.load_ms)}` : "";
      parts.push(
        `${many(shown.loaded, "token")} loaded from the store${took}${shown.resident ? "" : saved}.`,
      );
    }
    if (shown.resident)
      parts.push(`${many(shown.resident, "token")} still in the engine's prefix cache${saved}.`);
    if (shown.moved) parts.push(`${many(shown.moved, "token")} moved to a new place.`);
  }
  const kept = source.shared_tokens;
  if (kept !== undefined && kept < source.tokens && source.outcome !== "rosetta") {
    parts.push(`The prompt shares ${count(kept)} of the context's ${many(source.tokens, "token")}.`);
  }
  if (source.exact === false)
    parts.push("Not exact: the answer may differ from one computed from the start.");
  return parts;
}
