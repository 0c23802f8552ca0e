// usage: node saves.mjs KIT FROM TO LIMIT keep|replace: saves states of equal numbers until it is killed.
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [root, from, to, limit, before] = process.argv.slice(2);
const { CheckpointState } = await import(pathToFileURL(join(root, 'dist/index.js')));
const state = await CheckpointState.load(from);
for (let number = Number(state.properties.get('number') ?? 0) + 1; ; number++) {
  for (const { data } of state.parameters.values()) data.fill(number);
  state.properties.set('number', number);
  const keepPrevious = before === 'keep';
  await state.save(to, true, { dataFileAbove: Number(limit), keepPrevious });
  console.log(number);
}
