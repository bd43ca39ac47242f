/** A card for each engine: its state and why, its load, and for operators start, stop and restart. */
import { signal, useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect } from "preact/hooks";
import { ask, inWords } from "./api";
import { type Engine, engines, operator, readEngines, STATES } from "./live";
import { announce, CopyAs, Fault, Twice } from "./parts";
import { bytes, count, span } from "./words";

const EVERY_MS = 2000;
const KEPT = 60;

/** What the last two minutes were, by engine; kept while the page is open. */
const past = signal<Map<string, { tokens: number; running: number }[]>>(new Map());

function remember(): void {
  const next = new Map(past.peek());
  for (const one of engines.peek() ?? []) {
    const row = { tokens: one.tokens_per_s ?? 0, running: one.running };
    next.set(one.name, [...(next.get(one.name) ?? []), row].slice(-KEPT));
  }
  past.value = next;
}

export function Engines() {
  const fault = useSignal<ReturnType<typeof inWords> | null>(null);
  useEffect(() => {
    const look = async () => {
      if (document.hidden) return;
      try {
        await readEngines();
        remember();
        fault.value = null;
      } catch (error) {
        fault.value = inWords(error);
      }
    };
    look();
    const timer = setInterval(look, EVERY_MS);
    return () => clearInterval(timer);
  }, [fault]);
  const list = engines.value ?? [];
  return (
    <>
      <div class="row spread head">
        <h1>Engines</h1>
        {!operator.value && <p class="note">Start, stop and restart are for operators' keys.</p>}
      </div>
      {fault.value && <Fault fault={fault.value} />}
      <ul class="plain cards">
        {list.map((engine) => (
          <Card key={engine.name} engine={engine} />
        ))}
      </ul>
    </>
  );
}

function Card({ engine }: { engine: Engine }) {
  const fault = useSignal<ReturnType<typeof inWords> | null>(null);
  const route = (act: string) => `/v1/engines/${encodeURIComponent(engine.name)}/${act}`;
  async function run(act: string) {
    try {
      await ask(route(act), { method: "POST" });
      fault.value = null;
      announce(`${engine.name}: ${act} has begun.`);
      await readEngines();
    } catch (error) {
      fault.value = inWords(error);
    }
  }
  const down = ["stopped", "failed", "stopping", "unloaded"].includes(engine.state);
  const samples = past.value.get(engine.name) ?? [];
  return (
    <li class="card engine" aria-label={engine.name}>
      <div class="row spread">
        <h2>{engine.name}</h2>
        <span class={`state ${engine.state}`}>{STATES[engine.state]}</span>
      </div>
      {engine.why && <p class="note">{engine.why}</p>}
      <div class="figures">
        {engine.kind === "generate" && (
          <Figure name="Tokens/s" value={engine.tokens_per_s === null ? "–" : engine.tokens_per_s.toFixed(1)}>
            <Line values={samples.map((one) => one.tokens)} />
          </Figure>
        )}
        <Figure
          name={engine.waiting ? `Running, ${count(engine.waiting)} waiting` : "Running"}
          value={count(engine.running)}
        >
          <Line values={samples.map((one) => one.running)} />
        </Figure>
        {engine.kind === "generate" && engine.kv_used !== null && (
          <Figure name="KV in use" value={`${Math.round(engine.kv_used * 100)} %`}>
            <meter min={0} max={1} value={engine.kv_used} aria-label="KV in use" />
          </Figure>
        )}
      </div>
      <p class="note">{about(engine)}</p>
      {fault.value && <Fault fault={fault.value} />}
      {operator.value && engine.here && (
        <div class="row acts">
          {down ? (
            <button type="button" onClick={() => run("start")}>
              Start
            </button>
          ) : (
            <>
              <Twice name="Stop" ask={`Yes, stop ${engine.name}`} act={() => run("stop")} />
              <Twice name="Restart" ask={`Yes, restart ${engine.name}`} act={() => run("restart")} />
            </>
          )}
          <CopyAs
            title={down ? `Start ${engine.name}` : `Restart ${engine.name}`}
            call={() => ({ method: "POST", route: route(down ? "start" : "restart") })}
          />
        </div>
      )}
    </li>
  );
}

function about(engine: Engine): string {
  const words = [engine.can.join(", ")];
  const others = engine.models.filter((name) => name !== engine.name);
  if (others.length) words.push(`also called ${others.join(", ")}`);
  if (!engine.here) words.push("a server elsewhere");
  if (engine.memory_bytes) words.push(`${bytes(engine.memory_bytes)} of memory`);
  if (engine.started_at) words.push(`up for ${span(Date.now() / 1000 - engine.started_at)}`);
  if (engine.restarts) words.push(`restarted ${engine.restarts === 1 ? "once" : `${engine.restarts} times`}`);
  return words.filter(Boolean).join(" · ");
}

function Figure({ name, value, children }: { name: string; value: string; children: ComponentChildren }) {
  return (
    <div class="figure">
      <span class="value">{value}</span>
      <span class="name">{name}</span>
      {children}
    </div>
  );
}

/** A line of the last two minutes, highest value on top. The figure beside it says the last one in words. */
function Line({ values }: { values: number[] }) {
  const most = Math.max(1, ...values);
  const points = values.map((value, index) => {
    const x = 100 - ((values.length - 1 - index) * 100) / (KEPT - 1);
    return `${x.toFixed(1)},${(23 - (22 * value) / most).toFixed(1)}`;
  });
  return (
    <svg class="line" viewBox="0 0 100 24" preserveAspectRatio="none" aria-hidden="true" focusable="false">
      <polyline points={points.join(" ")} />
    </svg>
  );
}
