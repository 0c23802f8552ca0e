// usage: node decoder.mjs KIT PACKAGE FOLDER TOKENS ODD PROMPT...: trains three steps on FOLDER/ids.bin,
// rows of TOKENS, writes the adapter into FOLDER in both forms, and prints, for each prompt and
// each adapter, what follows: the likeliest tokens, drawn ones, and the logits of the first; and what
// is drawn of logits as ODD has them, lists of [logits, temperature, topK, topP, seed], or the error.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [root, source, folder, length, odd, ...prompts] = process.argv.slice(2);
const kit = await import(pathToFileURL(join(root, 'dist/index.js')));
const opened = await kit.TrainingPackage.open(source);
const session = await kit.TrainingSession.create({ package: opened }, { intraOpNumThreads: 1 });
session.setLearningRate(0.01);
const ids = new BigInt64Array(new Uint8Array(readFileSync(join(folder, 'ids.bin'))).buffer);
const tensor = (data) => new session.ort.Tensor('int64', data, [ids.length / length, Number(length)]);
const inputs = {
  input_ids: tensor(ids), labels: tensor(ids), attention_mask: tensor(ids.map(() => 1n)),
  position_ids: tensor(ids.map((_, i) => BigInt(i % length))),
};
const batch = Object.fromEntries(session.trainingInputNames.map((name) => [name, inputs[name]]));
for (let step = 0; step < 3; step++) await session.stepOn(batch);
const forms = ['it.onnx_adapter', 'peft'].map((form) => join(folder, form));
for (const form of forms) await kit.saveAdapter(opened, session.state, form);

const generator = await kit.Generator.open(opened, { intraOpNumThreads: 1 });
const all = async (prompt, options) => {
  const found = [];
  for await (const token of generator.generate(prompt, { maxTokens: 9, ...options })) found.push(token);
  return found;
};
for (const [i, form] of forms.entries()) await generator.addAdapter(`${i}`, form);
await generator.addAdapter('state', session.state);
await generator.addAdapter('gone', await kit.onnxAdapter(opened, session.state));
generator.removeAdapter('gone');
const results = [];
for (const text of prompts) {
  const prompt = JSON.parse(text);
  for (const adapter of ['0', '1', 'state', undefined]) {
    const likeliest = await all(prompt, { adapter });
    results.push({
      likeliest, logits: [...await generator.logits(prompt, adapter)],
      drawn: await all(prompt, { adapter, temperature: 1.5, topP: 0.95, seed: 7 }),
      few: await all(prompt, { adapter, temperature: 1.5, topK: 3, seed: 8 }),
      stopped: await all(prompt, { adapter, stop: [likeliest[3]] }),
    });
  }
}
const other = await kit.CheckpointState.load(await session.state.toBlob());
other.parameters.delete([...other.parameters.keys()].find((name) => other.parameters.get(name).requiresGrad));
const code = (work) => work().then(() => 'none', (error) => error.code);
const codes = [
  await code(() => all([1], { adapter: 'gone' })), await code(() => all([])),
  await code(() => all([1], { topP: 0 })), await code(() => all([1], { seed: 1.5 })),
  await code(() => all([1], { topK: 1.5 })), await code(() => all([1], { stop: [2, 0.5] })),
  await code(() => all([10 ** 9])), await code(() => all([1], { stop: 5 })), await code(() => all()),
  await code(() => generator.logits()), await code(() => generator.addAdapter('other', other)),
];
const [logits, begun] = [generator.logits([1]), code(() => all([1]))];
await new Promise(process.nextTick); // both wait for ONNX Runtime
await Promise.all([logits, generator.release(), generator.release()]);
codes.push(await begun, await code(() => all([1])), await code(() => generator.logits([1])));
const drawn = [];
for (const [logits, temperature, topK, topP, seed] of JSON.parse(odd)) {
  const made = new session.ort.Tensor('float32', logits.map(Number), [1, 1, logits.length]);
  const decoder = { inputNames: [], outputNames: [], inputMetadata: [], run: async () => ({ logits: made }) };
  const ort = Object.create(session.ort, { InferenceSession: { value: { create: async () => decoder } } });
  const other = await kit.Generator.open(opened, { ort });
  const next = other.generate([1], { temperature, topK, topP, seed }).next();
  drawn.push(await next.then(({ value }) => value, (error) => error.code));
}
await session.release();
console.log(JSON.stringify({ results, codes, drawn }));
