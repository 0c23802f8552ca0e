// usage: node suite.mjs KIT FOLDER exact|near: the results of the suite in a folder as JSON. The kit
// is installed beside ONNX Runtime.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { runSuite } from './conformance.mjs';

const [root, folder, mode] = process.argv.slice(2);
const kit = await import(pathToFileURL(join(root, 'dist/index.js')));
const { default: ort } = await import(
  pathToFileURL(join(root, '../onnxruntime-node/dist/index.js'))
);
const at = (path) => join(folder, path);
const read = (path) => new Uint8Array(readFileSync(at(path)));
const options = { intraOpNumThreads: 1 };
const results = await runSuite({ kit, ort, read, at, exact: mode === 'exact', options });
console.log(JSON.stringify(results));
