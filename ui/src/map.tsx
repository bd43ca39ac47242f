/** Draw a map: look at a scene before anything runs, run, lay the classes over the scene, ask about it. */
import { signal, useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { inWords, upload } from "./api";
import { PICTURES, talkers } from "./chat";
import { type Engine, engines, STATES } from "./live";
import { announce, CopyAs, dataUrl, dropping, Fault } from "./parts";
import { askAfter, begin, type Part } from "./talk";
import { readScene, type Scene } from "./tiff";
import { bytes, count, many, span } from "./words";

/** `data` of the answer of `POST /pooling`, as plugins/baton_geo/README.md has it. */
interface MapAnswer {
  data: string;
  crs: string | null;
  width: number;
  height: number;
  classes: { value: number; name: string; pixels: number; share: number; hectares: number | null }[];
  nodata_pixels: number;
  notes: string[];
  files: { name: string; media_type: string; data: string }[];
}

interface Drawn {
  answer: MapAnswer;
  files: Map<string, Blob>;
  colours: Scene["colours"];
  scene: string;
  classes: string;
}

interface Chosen {
  file: File;
  scene: Scene | null;
  refusal: string;
}

interface Run {
  sent: number;
  since: number;
  stopper: AbortController;
}

const OUTPUTS = "mask,preview,scene,classes";

/** What is at work stays while one looks at another view. */
const chosen = signal<Chosen | null>(null);
const running = signal<Run | null>(null);
const drawn = signal<Drawn | null>(null);
const fault = signal<ReturnType<typeof inWords> | null>(null);
const options = signal({ engine: "", bands: "", scale: "", offset: "", probabilities: false });

const USUAL: [string, string, string][] = [
  ["As the file states it", "", ""],
  ["Sentinel-2 since 2022: reflectance × 10000 + 1000", "", "-1000"],
  ["Landsat collection 2, level 2", "0.0000275", "-0.2"],
  ["Floats from 0 to 10000", "0.0001", ""],
  ["Floats from 0 to 1", "10000", ""],
  ["Per cent", "0.01", ""],
];

function mappers(): Engine[] {
  return (engines.value ?? []).filter((engine) => engine.can.includes("map"));
}

function mapper(): Engine | undefined {
  const found = mappers();
  return found.find((one) => one.name === options.value.engine) ?? found[0];
}

function route(): string {
  const { bands, scale, offset, probabilities } = options.value;
  const outputs = probabilities ? `${OUTPUTS},probabilities` : OUTPUTS;
  const query = new URLSearchParams({ model: mapper()?.name ?? "", outputs });
  for (const [name, value] of Object.entries({ indices: bands, scale, offset })) {
    if (value.trim()) query.set(name, value.replace(/\s+/g, ""));
  }
  return `/pooling?${query.toString().replaceAll("%2C", ",")}`;
}

function typeOf(file: File): string {
  return PICTURES.includes(file.type) ? file.type : "image/tiff";
}

async function take(file: File | undefined): Promise<void> {
  if (!file) return;
  drawn.value = null;
  fault.value = null;
  try {
    const scene = PICTURES.includes(file.type) ? null : await readScene(file);
    chosen.value = { file, scene, refusal: "" };
    announce(`${file.name}: ${scene ? many(scene.bands.length, "band") : "a picture"}. Nothing has run yet.`);
  } catch (error) {
    chosen.value = {
      file,
      scene: null,
      refusal: error instanceof Error ? error.message : "It cannot be read.",
    };
  }
}

async function draw(): Promise<void> {
  if (!chosen.value) return;
  const { file } = chosen.value;
  const stopper = new AbortController();
  running.value = { sent: 0, since: Date.now() / 1000, stopper };
  fault.value = null;
  try {
    const sent = (share: number) => {
      if (running.value) running.value = { ...running.value, sent: share };
    };
    const answer = await upload<{ data: MapAnswer }>(route(), file, typeOf(file), sent, stopper.signal);
    drawn.value = await opened(answer.data);
    announce("The map is drawn.");
  } catch (error) {
    fault.value = inWords(error);
  } finally {
    running.value = null;
  }
}

async function opened(answer: MapAnswer): Promise<Drawn> {
  if (drawn.value) for (const url of [drawn.value.scene, drawn.value.classes]) URL.revokeObjectURL(url);
  const mask = blob(answer.data, "image/tiff");
  const files = new Map([["mask.tif", mask]]);
  for (const each of answer.files) files.set(each.name, blob(each.data, each.media_type));
  const url = (name: string) => {
    const found = files.get(name);
    return found ? URL.createObjectURL(found) : "";
  };
  const colours = (await readScene(mask)).colours;
  return { answer, files, colours, scene: url("scene.png"), classes: url("classes.png") };
}

function blob(base64: string, type: string): Blob {
  const text = atob(base64);
  const data = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) data[at] = text.charCodeAt(at);
  return new Blob([data], { type });
}

export function MapView() {
  const over = useSignal(false);
  const input = useRef<HTMLInputElement>(null);
  const engine = mapper();
  if (engines.value && !engine) {
    return (
      <>
        <h1>Map</h1>
        <div class="empty">
          <p>
            No engine here draws maps. Add one to the settings: <code>flood-tiny</code> comes with Baton and
            finds water.
          </p>
        </div>
      </>
    );
  }
  return (
    <>
      <h1>Map</h1>
      <div
        class={`drop${over.value ? " over" : ""}${chosen.value ? " small" : ""}`}
        {...dropping(over, (files) => take(files[0]))}
      >
        <p>
          {chosen.value
            ? `${chosen.value.file.name}, ${bytes(chosen.value.file.size)}`
            : "Drop a GeoTIFF here: a satellite scene with the bands the model takes. You see what is in it before anything runs."}
        </p>
        <input
          ref={input}
          hidden
          type="file"
          aria-label="Scene"
          accept=".tif,.tiff,image/tiff,image/png,image/jpeg"
          onChange={(event) => {
            take(event.currentTarget.files?.[0]);
            event.currentTarget.value = "";
          }}
        />
        <button type="button" class={chosen.value ? "" : "primary"} onClick={() => input.current?.click()}>
          {chosen.value ? "Choose another" : "Choose a file"}
        </button>
      </div>
      {!chosen.value && (
        <p class="note">
          No scene at hand? <code>python -m baton_geo.flood.scene scene.tif</code> writes a made-up one.
        </p>
      )}
      {chosen.value?.refusal && (
        <Fault
          fault={{
            message: chosen.value.refusal,
            advice: "Drop a GeoTIFF, or a PNG or JPEG for a model of three bands.",
          }}
        />
      )}
      {chosen.value && !chosen.value.refusal && <Before chosen={chosen.value} engine={engine} />}
      {running.value && <Progress run={running.value} />}
      {fault.value && <Fault fault={fault.value} />}
      {drawn.value && chosen.value && <Result drawn={drawn.value} name={chosen.value.file.name} />}
    </>
  );
}

function Before({ chosen: { file, scene }, engine }: { chosen: Chosen; engine: Engine | undefined }) {
  const set = (changes: Partial<typeof options.value>) => {
    options.value = { ...options.value, ...changes };
  };
  const { bands, scale, offset, probabilities } = options.value;
  const usual = USUAL.findIndex(([, s, o]) => s === scale && o === offset);
  const found = mappers();
  return (
    <form
      class="card before"
      onSubmit={(event) => {
        event.preventDefault();
        draw();
      }}
    >
      <h2>What the file says</h2>
      {scene ? <Says scene={scene} /> : <p class="note">A picture: its three colours are the bands.</p>}
      <h2>What the model is given</h2>
      <div class="fields">
        {found.length > 1 && (
          <label class="stack">
            <span>Engine</span>
            <select
              value={engine?.name ?? ""}
              onChange={(event) => set({ engine: event.currentTarget.value })}
            >
              {found.map((one) => (
                <option key={one.name} value={one.name}>
                  {one.name}
                </option>
              ))}
            </select>
          </label>
        )}
        <label class="stack">
          <span>Bands, from 0, in the model's order</span>
          <input
            value={bands}
            placeholder="by what the file says of them"
            pattern="\s*\d+(\s*,\s*\d+)*\s*"
            title="Numbers with commas between them: 1, 2, 3, 8, 10, 11"
            onInput={(event) => set({ bands: event.currentTarget.value })}
          />
        </label>
        <label class="stack wide">
          <span>The numbers are</span>
          <select
            value={String(usual)}
            onChange={(event) => {
              const [, s = "", o = ""] = USUAL[Number(event.currentTarget.value)] ?? [];
              set({ scale: s, offset: o });
            }}
          >
            {usual < 0 && <option value="-1">As typed below</option>}
            {USUAL.map(([name], index) => (
              <option key={name} value={String(index)}>
                {name}
              </option>
            ))}
          </select>
        </label>
        <label class="stack">
          <span>Scale</span>
          <input
            value={scale}
            placeholder="as the file states"
            onInput={(event) => set({ scale: event.currentTarget.value })}
          />
        </label>
        <label class="stack">
          <span>Offset</span>
          <input
            value={offset}
            placeholder="as the file states"
            onInput={(event) => set({ offset: event.currentTarget.value })}
          />
        </label>
        <label class="row wide">
          <input
            type="checkbox"
            checked={probabilities}
            onChange={() => set({ probabilities: !probabilities })}
          />
          <span>A file with the probability of each class too</span>
        </label>
      </div>
      <div class="row">
        {running.value ? (
          <button type="button" class="primary" onClick={() => running.value?.stopper.abort()}>
            Stop
          </button>
        ) : (
          <button type="submit" class="primary" disabled={!engine}>
            Draw the map
          </button>
        )}
        <CopyAs
          title={`Draw a map of ${file.name}`}
          call={() => ({
            method: "POST",
            route: route(),
            file: { name: file.name, type: typeOf(file), accept: "application/json" },
          })}
        />
        {engine && engine.state !== "ready" && (
          <span class="note">
            {engine.name} is {STATES[engine.state]}.
          </span>
        )}
      </div>
    </form>
  );
}

function Says({ scene }: { scene: Scene }) {
  const scaled = scene.bands.some((band) => band.scale || band.offset);
  const more = scene.bands.some((band) => band.about.length);
  const facts: [string, string][] = [
    ["Size", `${count(scene.width)} × ${count(scene.height)} pixels`],
    ["Numbers", `${scene.type}, compression ${scene.compression}`],
    [
      "Place",
      scene.crs
        ? `${scene.crs}${scene.pixel ? `, a pixel is ${scene.pixel}` : ""}`
        : "not stated: areas will be in pixels",
    ],
    ["Nodata", scene.nodata || "not stated"],
    ["Scale", scaled ? "stated, by band below" : "not stated: taken as they are"],
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
      <section class="scroll" aria-label="Bands of the file" tabIndex={0}>
        <table class="bands">
          <thead>
            <tr>
              <th scope="col" class="number">
                Band
              </th>
              <th scope="col">Name</th>
              {scaled && <th scope="col">Scale</th>}
              {scaled && <th scope="col">Offset</th>}
              {more && <th scope="col">Says too</th>}
            </tr>
          </thead>
          <tbody>
            {scene.bands.slice(0, 64).map((band, index) => (
              <tr key={index}>
                <td class="number">{index}</td>
                <td>{band.name || <span class="note">no name</span>}</td>
                {scaled && <td>{band.scale || "1"}</td>}
                {scaled && <td>{band.offset || "0"}</td>}
                {more && <td>{band.about.join(", ")}</td>}
              </tr>
            ))}
          </tbody>
        </table>
      </section>
      {scene.bands.length > 64 && <p class="note">And {count(scene.bands.length - 64)} more bands.</p>}
      {!scene.bands.some((band) => band.name || band.about.length) && (
        <p class="note">
          The file does not say what its bands are. If it has as many as the model takes, their order decides.
        </p>
      )}
      {scene.tags.length > 0 && (
        <details>
          <summary>{many(scene.tags.length, "tag")} of the file</summary>
          <dl class="facts">
            {scene.tags.slice(0, 40).map(([name, value]) => (
              <div key={name}>
                <dt>{name}</dt>
                <dd>{value}</dd>
              </div>
            ))}
          </dl>
        </details>
      )}
    </>
  );
}

function Progress({ run }: { run: Run }) {
  const now = useSignal(Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => {
      now.value = Date.now() / 1000;
    }, 1000);
    return () => clearInterval(timer);
  }, [now]);
  const sending = run.sent < 1;
  return (
    <div class="card working-card">
      <p>
        {sending
          ? `Sending the scene: ${Math.round(run.sent * 100)} %`
          : `The model is at work: ${span(now.value - run.since)} so far`}
      </p>
      <progress aria-label="Progress" max={1} {...(sending ? { value: run.sent } : {})} />
    </div>
  );
}

function Result({ drawn: { answer, files, colours, scene, classes }, name }: { drawn: Drawn; name: string }) {
  const opacity = useSignal(60);
  const swatch = (value: number) => ({ background: `rgb(${(colours[value] ?? [128, 128, 128]).join(" ")})` });
  return (
    <section class="result" aria-label="The map">
      <figure class="stage">
        <div class="layers">
          <img src={scene} alt={`The scene ${name}`} />
          <img
            src={classes}
            alt="The classes over it; the table says what their colours mean"
            style={{ opacity: String(opacity.value / 100) }}
          />
        </div>
        <figcaption>
          <label class="slider">
            <span>Classes over the scene</span>
            <input
              type="range"
              min={0}
              max={100}
              value={opacity}
              aria-valuetext={`${opacity.value} per cent`}
              onInput={(event) => {
                opacity.value = Number(event.currentTarget.value);
              }}
            />
            <output>{opacity} %</output>
          </label>
        </figcaption>
      </figure>
      <div>
        <table class="classes">
          <caption class="hidden">Areas of the classes</caption>
          <thead>
            <tr>
              <th scope="col">Class</th>
              <th scope="col" class="number">
                Share
              </th>
              <th scope="col" class="number">
                {answer.classes.some((one) => one.hectares !== null) ? "Hectares" : "Pixels"}
              </th>
            </tr>
          </thead>
          <tbody>
            {answer.classes.map((one) => (
              <tr key={one.value}>
                <th scope="row">
                  <span class="swatch" style={swatch(one.value)} /> {one.name}
                </th>
                <td class="number">{(one.share * 100).toFixed(1)} %</td>
                <td class="number">
                  {one.hectares === null ? count(one.pixels) : count(Math.round(one.hectares))}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
        {answer.nodata_pixels > 0 && <p class="note">{many(answer.nodata_pixels, "pixel")} without data.</p>}
        {answer.notes.length > 0 && (
          <>
            <h2>What was assumed</h2>
            <ul class="notes">
              {answer.notes.map((note) => (
                <li key={note}>{note.replace(/^\w+: /, "")}</li>
              ))}
            </ul>
          </>
        )}
        <h2>Files</h2>
        <div class="row">
          {["mask.tif", "probabilities.tif", "preview.png"].map((file) => {
            const found = files.get(file);
            return (
              found && (
                <Download
                  key={file}
                  name={`${name.replace(/\.\w+$/, "")}-${file}`}
                  shown={file}
                  file={found}
                />
              )
            );
          })}
        </div>
        <AskAbout answer={answer} preview={files.get("preview.png")} name={name} />
      </div>
    </section>
  );
}

function Download({ name, shown, file }: { name: string; shown: string; file: Blob }) {
  return (
    <button
      type="button"
      onClick={() => {
        const link = document.createElement("a");
        link.href = URL.createObjectURL(file);
        link.download = name;
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 60000);
      }}
    >
      {shown} <span class="note">{bytes(file.size)}</span>
    </button>
  );
}

/** Ask a chat engine about the map: it is shown the preview, where it takes pictures, and the areas in a line. */
function AskAbout({ answer, preview, name }: { answer: MapAnswer; preview: Blob | undefined; name: string }) {
  const text = useSignal("Describe the picture.");
  const engine = useSignal("");
  const found = talkers();
  const sees = (one: Engine) => one.can.includes("vision");
  const used = found.find((one) => one.name === engine.value) ?? found.find(sees) ?? found[0];
  if (!used) return null;
  const areas = answer.classes
    .map(
      (one) =>
        `${one.name} ${(one.share * 100).toFixed(1)} %${one.hectares === null ? "" : ` (${count(Math.round(one.hectares))} ha)`}`,
    )
    .join(", ");
  return (
    <form
      class="stack"
      onSubmit={async (event) => {
        event.preventDefault();
        const asked = `Map of ${name}. Areas: ${areas}.\n${text.value}`;
        let content: string | Part[] = asked;
        if (preview && sees(used)) {
          const url = await dataUrl(preview);
          content = [
            { type: "image_url", image_url: { url } },
            { type: "text", text: asked },
          ];
        }
        const made = begin();
        askAfter(made.id, null, [{ role: "user", content }], used.name, "tip");
        location.hash = `#/chat/${made.id}`;
      }}
    >
      <h2>
        <label for="about">Ask about it</label>
      </h2>
      <textarea
        id="about"
        rows={2}
        value={text}
        onInput={(event) => {
          text.value = event.currentTarget.value;
        }}
      />
      <div class="row">
        <select
          aria-label="Engine to ask"
          value={used.name}
          onChange={(event) => {
            engine.value = event.currentTarget.value;
          }}
        >
          {found.map((one) => (
            <option key={one.name} value={one.name}>
              {one.name}
            </option>
          ))}
        </select>
        <button type="submit" class="primary" disabled={!text.value.trim()}>
          Ask
        </button>
      </div>
      <p class="note">
        {sees(used)
          ? `${used.name} is shown the preview and the areas.`
          : `${used.name} takes no pictures: it is told the areas.`}{" "}
        The answer is kept among the contexts.
      </p>
    </form>
  );
}
