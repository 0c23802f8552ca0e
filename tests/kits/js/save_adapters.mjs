// usage: node save_adapters.mjs KIT PACKAGE TARGET...: saves the adapter of the package's state to each
// target, and prints of each "accepted" or the code of the error.
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [root, source, ...targets] = process.argv.slice(2);
const kit = await import(pathToFileURL(join(root, 'dist/index.js')));
const opened = await kit.TrainingPackage.open(source);
const state = await kit.CheckpointState.load(
  join(source, opened.manifest.files.checkpoint.path));
const results = {};
for (const target of targets) {
  results[target] = await kit.saveAdapter(opened, state, target)
    .then(() => 'accepted', (error) => error.code ?? error.stack);
}
console.log(JSON.stringify(results));
