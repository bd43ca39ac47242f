// Builds the page into the Python package, with the licences of what is bundled and the digests of the sources.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { join, relative } from "node:path";
import { defineConfig, type Plugin } from "vite";

const here = import.meta.dirname;

/** The files that decide what is built. tests/page compares their digests with those that were built from. */
function sources(): string[] {
  const inSrc = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(here, join(entry.parentPath, entry.name)));
  return [
    ...inSrc,
    "index.html",
    "package.json",
    "package-lock.json",
    "tsconfig.json",
    "vite.config.ts",
  ].sort();
}

function stamp(): Plugin {
  return {
    name: "sources-stamp",
    generateBundle() {
      const lines = sources().map((path) => {
        const digest = createHash("sha256")
          .update(readFileSync(join(here, path)))
          .digest("hex");
        return `${digest}  ui/${path}\n`;
      });
      this.emitFile({ type: "asset", fileName: "sources.sha256", source: lines.join("") });
    },
  };
}

/** Write name, version and licence text of every package of which the bundle holds a line. */
function licences(): Plugin {
  return {
    name: "licences",
    generateBundle(_options, bundle) {
      const packages = new Set<string>();
      for (const chunk of Object.values(bundle)) {
        for (const id of chunk.type === "chunk" ? Object.keys(chunk.modules) : []) {
          const found = /^.*\/node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(id);
          if (found?.[1]) packages.add(found[1]);
        }
      }
      const texts = [...packages].sort().map((name) => {
        const folder = join(here, "node_modules", name);
        const about = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
        const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
        if (!file) throw new Error(`${name} has no licence file`);
        return `${name} ${about.version} (${about.license})\n\n${readFileSync(join(folder, file), "utf8").trim()}\n`;
      });
      this.emitFile({
        type: "asset",
        fileName: "licences.txt",
        source: texts.join(`\n${"-".repeat(72)}\n\n`),
      });
    },
  };
}

/** The gateway serves the folder at `ui/` beside the page, wherever a proxy has put both. */
function besideThePage(): Plugin {
  return {
    name: "beside-the-page",
    enforce: "post",
    transformIndexHtml: { order: "post", handler: (html) => html.replaceAll('"./assets/', '"ui/assets/') },
  };
}

export default defineConfig({
  base: "./",
  plugins: [besideThePage(), stamp(), licences()],
  build: {
    outDir: "../app/baton/ui",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: false,
    target: "es2022",
  },
});
