// usage: node reader.mjs KIT hostile|read DIR: a line for each case of a corpus, or for each
// checkpoint and manifest of a folder, sorted by name.
import { createHash } from 'node:crypto';
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { hostile, readings } from './reading.mjs';

const [root, command, folder] = process.argv.slice(2);
const load = (path) => import(pathToFileURL(join(root, path)));
const kit = await load('dist/index.js');
const { parseManifest } = await load('dist/manifest.js');
const { default: ort } = await load('node_modules/onnxruntime-node/dist/index.js');
const context = {
  kit, parseManifest, ort,
  at: (path) => join(folder, path),
  read: async (path) => new Uint8Array(readFileSync(join(folder, path))),
  sha256: async (bytes) => createHash('sha256').update(bytes).digest('hex'),
};
const names = readdirSync(folder).filter((each) => /\.(ckpt|json)$/.test(each));
names.sort((a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b)));
const lines = command === 'hostile' ? hostile(context) : readings(context, names);
for await (const line of lines) console.log(line);
