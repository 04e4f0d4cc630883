import { statSync } from "node:fs";
import { defineConfig } from "vite";

const runtime = "node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.wasm";

export default defineConfig({
  // any folder of any web server can hold the page
  base: "./",
  // the page states the size of its runtime
  define: { __RUNTIME_BYTES__: JSON.stringify(statSync(runtime).size) },
  build: {
    target: "es2022",
    // the runtime and its loader stay files of their own
    assetsInlineLimit: 0,
    chunkSizeWarningLimit: 1500,
  },
  resolve: {
    // without this condition the library embeds its own copy of the runtime's loader
    conditions: ["onnxruntime-web-use-extern-wasm", "module", "browser", "development|production"],
  },
});
