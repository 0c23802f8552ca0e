// usage: node hostile.mjs KIT FOLDER: what becomes of every file (as a checkpoint) and every folder (as
// the package of a session) in it, by name: "loaded", or the code of the error.
import { readdirSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [root, folder] = process.argv.slice(2);
const kit = await import(pathToFileURL(join(root, 'dist/index.js')));
const results = {};
for (const entry of readdirSync(folder, { withFileTypes: true })) {
  const path = join(folder, entry.name);
  try {
    if (!entry.isDirectory()) await kit.CheckpointState.load(path);
    else await (await kit.TrainingSession.create({ package: path })).release();
    results[entry.name] = 'loaded';
  } catch (error) {
    const clear = error instanceof kit.OdtpackError && error.what.endsWith('.');
    results[entry.name] = clear ? error.code : `unclear: ${error.stack}`;
  }
}
console.log(JSON.stringify(results));
