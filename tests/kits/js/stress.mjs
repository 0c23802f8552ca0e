// usage: node stress.mjs KIT PACKAGE ROOTS TIMES: what came of the calls of sessions.mjs, as JSON.
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { stress } from './sessions.mjs';

const [root, source, roots, times] = process.argv.slice(2);
const kit = await import(pathToFileURL(join(root, 'dist/index.js')));
const { default: ort } = await import(
  pathToFileURL(join(root, 'node_modules/onnxruntime-node/dist/index.js'))
);
console.log(JSON.stringify(await stress({ kit, ort, source, roots, times: Number(times) })));
