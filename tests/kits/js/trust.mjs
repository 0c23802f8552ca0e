// usage: node trust.mjs KIT load PATH: whether a checkpoint is checked, and what was lost;
// node trust.mjs KIT keep FROM PATH LIMIT: saves over a file, which is kept;
// node trust.mjs KIT export PACKAGE PATH: exports a model. Prints JSON.
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [root, action, from, to, limit] = process.argv.slice(2);
const kit = await import(pathToFileURL(join(root, 'dist/index.js')));
try {
  if (action === 'export') {
    const opened = await kit.TrainingPackage.open(from);
    const session = await kit.TrainingSession.create({ package: opened });
    await session.exportModelForInference(to);
  }
  const state = await kit.CheckpointState.load(from);
  if (action === 'keep') {
    await state.save(to, true, { keepPrevious: true, dataFileAbove: Number(limit) });
  }
  console.log(JSON.stringify([state.checked ? 'checked' : 'unchecked', state.recovered ?? '']));
} catch (error) {
  if (!(error instanceof kit.OdtpackError)) throw error;
  console.log(JSON.stringify([error.code, `${error.what} ${error.hint ?? ''}`.trim()]));
}
