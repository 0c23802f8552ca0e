// usage: node decoder.mjs KIT PACKAGE FOLDER TOKENS PROMPT...: trains three steps on FOLDER/ids.bin,
// rows of TOKENS, writes the adapter into FOLDER in both forms, and prints, for each prompt and
// each adapter, what follows: the likeliest tokens, drawn ones, and the logits of the first.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [root, source, folder, length, ...prompts] = process.argv.slice(2);
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
const code = (work) => work().then(() => 'none', (error) => error.code);
const codes = [
  await code(() => all([1], { adapter: 'gone' })), await code(() => all([])),
  await code(() => all([1], { topP: 0 })), await code(() => all([10 ** 9])),
];
await generator.release();
await session.release();
console.log(JSON.stringify({ results, codes }));
