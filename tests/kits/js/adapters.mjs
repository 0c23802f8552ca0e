// usage: node adapters.mjs KIT PACKAGE FOLDER FORM...: writes the adapter of FOLDER/python.ckpt as
// FOLDER/node/FORM, reads FOLDER/python/FORM into FOLDER/FORM.ckpt, by its path and from memory, and
// prints what becomes of every adapter in FOLDER/damaged: "loaded", into its name with .ckpt, or the
// code of the error.
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [root, source, folder, ...forms] = process.argv.slice(2);
const kit = await import(pathToFileURL(join(root, 'dist/index.js')));
const opened = await kit.TrainingPackage.open(source);
const fresh = () => kit.CheckpointState.load(join(source, opened.manifest.files.checkpoint.path));
const trained = await kit.CheckpointState.load(join(folder, 'python.ckpt'));
const values = (state) => Buffer.concat(
  [...state.parameters.keys()].sort().map((name) => {
    const { buffer, byteOffset, byteLength } = state.parameters.get(name).data;
    return new Uint8Array(buffer, byteOffset, byteLength);
  }),
);
const whole = values(trained);

for (const form of forms) {
  await kit.saveAdapter(opened, trained, join(folder, 'node', form));
  const state = await fresh();
  await kit.loadAdapter(opened, state, pathToFileURL(join(folder, 'python', form)));
  await state.save(join(folder, `${form}.ckpt`));
}
for (const target of [undefined, 5, '']) {
  const code = await kit.saveAdapter(opened, trained, target).catch((error) => error.code);
  if (code !== 'bad-argument') throw new Error(`${target}: ${code}`);
}
const pieces = [await kit.onnxAdapter(opened, trained), await kit.peftAdapter(opened, trained)];
for (const piece of pieces) {
  const state = await fresh();
  await kit.loadAdapter(opened, state, piece);
  if (!values(state).equals(whole)) throw new Error('from memory it is another');
}
const written = new Uint8Array(readFileSync(join(folder, 'node', forms[0])));
if (!Buffer.from(written).equals(pieces[0])) throw new Error('the file is not the bytes');

const results = {};
for (const name of readdirSync(join(folder, 'damaged'))) {
  const state = await fresh();
  const before = values(state);
  try {
    await kit.loadAdapter(opened, state, join(folder, 'damaged', name));
    await state.save(join(folder, 'damaged', `${name}.ckpt`));
    results[name] = 'loaded';
  } catch (error) {
    const clear = error instanceof kit.OdtpackError && error.what.endsWith('.');
    results[name] = clear ? error.code : `unclear: ${error.stack}`;
    if (!values(state).equals(before)) results[name] = 'changed';
  }
}
console.log(JSON.stringify(results));
