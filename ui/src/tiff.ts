/**
 * Read what a TIFF says of itself: size, type, bands, scale, place. Only the first directory, and no pixel, so
 * that a scene of a gigabyte is looked at in a moment. Whatever is wrong in the file is told, never trusted.
 */

export interface Band {
  name: string;
  scale: string;
  offset: string;
  about: string[];
}

export interface Scene {
  width: number;
  height: number;
  type: string;
  compression: string;
  crs: string;
  pixel: string;
  nodata: string;
  bands: Band[];
  tags: [string, string][];
  /** The colour table of a mask: red, green, blue of each value. */
  colours: [number, number, number][];
}

const SIZES: Record<number, number> = {
  1: 1,
  2: 1,
  3: 2,
  4: 4,
  5: 8,
  6: 1,
  7: 1,
  8: 2,
  9: 4,
  10: 8,
  11: 4,
  12: 8,
  13: 4,
  16: 8,
  17: 8,
  18: 8,
};
const LONGEST_VALUE = 1 << 20;
const MOST_BANDS = 4096;
const COMPRESSIONS: Record<number, string> = {
  1: "none",
  5: "LZW",
  7: "JPEG",
  8: "DEFLATE",
  32773: "PackBits",
  32946: "DEFLATE",
  34887: "LERC",
  34925: "LZMA",
  50000: "ZSTD",
  50001: "WebP",
};

type Values = Map<number, number[] | string>;

/** Read the head of a file. Raises an Error whose message says what is wrong. */
export async function readScene(file: Blob): Promise<Scene> {
  const values = await directory(file);
  const numbers = (tag: number): number[] => {
    const found = values.get(tag);
    return Array.isArray(found) ? found : [];
  };
  const text = (tag: number): string => {
    const found = values.get(tag);
    return typeof found === "string" ? found : "";
  };
  const [width, height] = [numbers(256)[0] ?? 0, numbers(257)[0] ?? 0];
  if (width < 1 || height < 1) throw new Error("The file does not say how large it is.");
  const count = Math.min(numbers(277)[0] ?? 1, MOST_BANDS);
  const { bands, tags } = described(text(42112), count);
  const interpreted = numbers(262)[0] === 2 ? ["red", "green", "blue"] : [];
  interpreted.forEach((colour, index) => {
    bands[index]?.about.push(`marked ${colour}`);
  });
  const kind = ["", "unsigned", "signed", "float"][numbers(339)[0] ?? 1] ?? "";
  const scale = numbers(33550);
  return {
    width,
    height,
    type: `${numbers(258)[0] ?? 1}-bit ${kind || "unsigned"}`,
    compression: COMPRESSIONS[numbers(259)[0] ?? 1] ?? `number ${numbers(259)[0]}`,
    crs: crsOf(numbers(34735)),
    pixel:
      scale.length >= 2
        ? `${round(scale[0])} × ${round(scale[1])}`
        : numbers(34264).length
          ? "rotated grid"
          : "",
    nodata: text(42113).trim(),
    bands,
    tags,
    colours: coloursOf(numbers(320)),
  };
}

function round(number: number | undefined): string {
  return number === undefined ? "?" : String(Number(number.toPrecision(6)));
}

async function directory(file: Blob): Promise<Values> {
  const head = await view(file, 0, 16);
  const order = head.getUint16(0);
  if (order !== 0x4949 && order !== 0x4d4d) throw new Error("This is no TIFF.");
  const little = order === 0x4949;
  const version = head.getUint16(2, little);
  if (version !== 42 && version !== 43) throw new Error("This is no TIFF.");
  const big = version === 43;
  const place = big ? Number(head.getBigUint64(8, little)) : head.getUint32(4, little);
  const countSize = big ? 8 : 2;
  const counted = await view(file, place, countSize);
  const entries = big ? Number(counted.getBigUint64(0, little)) : counted.getUint16(0, little);
  if (entries > 4096) throw new Error("The file's directory is damaged.");
  const size = big ? 20 : 12;
  const rows = await view(file, place + countSize, entries * size);
  const values: Values = new Map();
  for (let row = 0; row < entries; row++) {
    const at = row * size;
    const tag = rows.getUint16(at, little);
    if (!WANTED.has(tag)) continue;
    const type = rows.getUint16(at + 2, little);
    const number = big ? Number(rows.getBigUint64(at + 4, little)) : rows.getUint32(at + 4, little);
    const length = (SIZES[type] ?? 1) * number;
    if (length > LONGEST_VALUE) continue;
    const inline = at + (big ? 12 : 8);
    const away = big ? Number(rows.getBigUint64(inline, little)) : rows.getUint32(inline, little);
    const data =
      length <= (big ? 8 : 4) ? new DataView(rows.buffer, inline, length) : await view(file, away, length);
    values.set(tag, valuesOf(data, type, number, little));
  }
  return values;
}

const WANTED = new Set([256, 257, 258, 259, 262, 277, 320, 339, 33550, 34264, 34735, 42112, 42113]);

async function view(file: Blob, from: number, length: number): Promise<DataView> {
  const bytes = await file.slice(from, from + length).arrayBuffer();
  if (bytes.byteLength < length) throw new Error("The file ends too early: it is cut short or damaged.");
  return new DataView(bytes);
}

function valuesOf(data: DataView, type: number, count: number, little: boolean): number[] | string {
  if (type === 2) {
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    return new TextDecoder().decode(bytes).replace(/\0+$/, "");
  }
  const size = SIZES[type] ?? 1;
  const readers: Record<number, (at: number) => number> = {
    3: (at) => data.getUint16(at, little),
    4: (at) => data.getUint32(at, little),
    8: (at) => data.getInt16(at, little),
    9: (at) => data.getInt32(at, little),
    11: (at) => data.getFloat32(at, little),
    12: (at) => data.getFloat64(at, little),
    16: (at) => Number(data.getBigUint64(at, little)),
  };
  const read = readers[type] ?? ((at: number) => data.getUint8(at));
  return Array.from({ length: count }, (_, index) => read(index * size));
}

/** Bands and tags of GDAL's metadata, an XML text in the file. */
function described(xml: string, count: number): { bands: Band[]; tags: [string, string][] } {
  const bands: Band[] = Array.from({ length: count }, () => ({ name: "", scale: "", offset: "", about: [] }));
  const tags: [string, string][] = [];
  const items = xml ? new DOMParser().parseFromString(xml, "text/xml").querySelectorAll("Item") : [];
  for (const item of items) {
    const [name, text] = [item.getAttribute("name") ?? "", unescaped(item.textContent ?? "")];
    const sample = item.getAttribute("sample");
    const band = sample === null ? undefined : bands[Number(sample)];
    if (sample === null) tags.push([name, text]);
    else if (!band) continue;
    else if (item.getAttribute("role") === "description") band.name = text;
    else if (item.getAttribute("role") === "scale") band.scale = text;
    else if (item.getAttribute("role") === "offset") band.offset = text;
    else band.about.push(`${name}: ${text}`);
  }
  return { bands, tags };
}

const ESCAPES: Record<string, string> = {
  "&lt;": "<",
  "&gt;": ">",
  "&quot;": '"',
  "&apos;": "'",
  "&amp;": "&",
};

/** GDAL escapes a value before it escapes it for XML. */
function unescaped(text: string): string {
  return text.replace(/&(?:lt|gt|quot|apos|amp);/g, (found) => ESCAPES[found] ?? found);
}

function crsOf(keys: number[]): string {
  for (let at = 4; at + 3 < keys.length; at += 4) {
    const [name, place, , value] = keys.slice(at, at + 4);
    if ((name === 3072 || name === 2048) && place === 0 && value !== 32767 && value) return `EPSG:${value}`;
  }
  return keys.length ? "its own" : "";
}

function coloursOf(table: number[]): [number, number, number][] {
  const size = table.length / 3;
  const at = (index: number) => (table[index] ?? 0) >> 8;
  return Array.from({ length: size }, (_, value) => [at(value), at(value + size), at(value + 2 * size)]);
}
