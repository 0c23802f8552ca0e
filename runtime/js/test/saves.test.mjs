// Saves in Node: what is kept, what a fault at any call of the system leaves, what is refused.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import fs from 'node:fs';
import { syncBuiltinESMExports } from 'node:module';
import { tmpdir } from 'node:os';
import { basename, dirname, join } from 'node:path';
import test from 'node:test';
import { CheckpointState, OdtpackError } from '../dist/index.js';

const { mkdtempSync, readdirSync, readFileSync, statSync, writeFileSync } = fs;
const folder = () => mkdtempSync(join(tmpdir(), 'kit-'));

function state(value, size = 1000) {
  const data = new Float32Array(size).fill(value);
  const tensor = { name: 'p', dtype: 'float32', requiresGrad: true, dims: [size], data };
  const parameters = new Map([['p', tensor]]);
  return new CheckpointState({
    parameters, nominal: false, optimizer: undefined, properties: new Map(),
  });
}

const valueOf = async (path) => (await CheckpointState.load(path)).parameters.get('p').data[0];
const fill = (saved, value) => saved.parameters.get('p').data.fill(value);

test('a damaged file never replaces the save before, whatever its path is called', async () => {
  for (const dataFileAbove of [2 ** 30, 100]) {
    const path = join(folder(), 'ck');
    const options = { keepPrevious: true, dataFileAbove };
    const saved = state(1);
    await saved.save(path, true, options);
    await saved.save(path, true, options);
    const damaged = readFileSync(path).fill(0, 0, 4);
    writeFileSync(path, damaged);
    const good = readFileSync(`${path}.previous`);
    const back = await CheckpointState.load(path);
    assert.ok(back.recovered);
    // The same file by another name, and a state that knows nothing of the damage.
    fill(back, 7);
    const other = join(dirname(path), '..', basename(dirname(path)), 'ck');
    for (const each of [back, state(8)]) {
      await each.save(other, true, options);
      assert.deepEqual(readFileSync(`${path}.previous`), good);
      assert.equal(await valueOf(`${path}.previous`), 1);
      assert.equal(await valueOf(path), each === back ? 7 : 8);
      if (each === back) writeFileSync(path, damaged);
    }
    await back.save(other, true, options); // a whole file takes the place again
    assert.equal(await valueOf(`${path}.previous`), 8);
  }
});

test('the data of large checkpoints keep two regions', async () => {
  const path = join(folder(), 'ck');
  const saved = state(0);
  for (let i = 1; i <= 9; i++) {
    fill(saved, i);
    await saved.save(path, true, { keepPrevious: true, dataFileAbove: 100 });
    assert.equal(await valueOf(path), i);
    if (i > 1) assert.equal(await valueOf(`${path}.previous`), i - 1);
    assert.ok(statSync(`${path}.data`).size <= 8000);
  }
  await saved.save(path, true, { dataFileAbove: 100 });
  assert.equal(await valueOf(`${path}.previous`), 8);
  await saved.save(path, true, { keepPrevious: true }); // from two files to one
  assert.equal(await valueOf(`${path}.previous`), 9);
  await saved.save(path, true, { keepPrevious: true });
  assert.deepEqual(readdirSync(dirname(path)).sort(), ['ck', 'ck.previous']);
});

test('saves of several states to one name take turns', async () => {
  const path = join(folder(), 'ck');
  const other = join(dirname(path), '..', basename(dirname(path)), 'ck'); // the same by another name
  for (let round = 0; round < 10; round++) {
    const states = [1, 2, 3, 4].map((value) => state(10 * round + value, 10_000));
    await Promise.all(states.map((each, i) => {
      return each.save(i % 2 ? path : other, true, { keepPrevious: true, dataFileAbove: 100 });
    }));
    assert.equal(await valueOf(path), 10 * round + 4);
    assert.equal(await valueOf(`${path}.previous`), 10 * round + 3);
  }
});

test('folders, pipes and devices are not replaced', async () => {
  const path = join(folder(), 'pipe');
  execFileSync('mkfifo', [path]);
  const code = (target) => state(1).save(target).then(() => 'saved', (error) => error.code);
  assert.equal(await code(path), 'file-not-written');
  assert.equal(await code('/dev/null'), 'file-not-written');
  assert.equal(await code('/'), 'path-is-a-folder');
  assert.equal(await code(dirname(path)), 'path-is-a-folder');
  assert.ok(statSync(path).isFIFO() && statSync('/dev/null').isCharacterDevice());
});

const CALLS = ['openSync', 'writev', 'fsyncSync', 'fstatSync', 'closeSync', 'linkSync', 'renameSync',
  'ftruncateSync', 'readdirSync'];

/** Lets the n-th call of all fail with a code; returns the name of the call, if there were so many. */
async function failing(n, code, work) {
  const own = Object.fromEntries(CALLS.map((name) => [name, fs[name]]));
  let count = 0;
  let failed;
  const fault = (name) => {
    failed = name;
    return Object.assign(new Error(`${code}: injected`), { code });
  };
  for (const name of CALLS) {
    fs[name] = (...args) => {
      if (++count !== n) return own[name](...args);
      if (name === 'closeSync') own[name](...args);
      if (name === 'writev') return args.at(-1)(fault(name));
      throw fault(name);
    };
    Object.defineProperties(fs[name], Object.getOwnPropertyDescriptors(own[name])); // for promisify
  }
  syncBuiltinESMExports();
  try {
    await work();
  } finally {
    Object.assign(fs, own);
    syncBuiltinESMExports();
  }
  return failed;
}

for (const dataFileAbove of [2 ** 30, 100]) {
  test(`a fault at any call leaves the old file, or the new one and says so (${dataFileAbove})`, async () => {
    const seen = new Set();
    for (const code of ['EIO', 'ENOSPC', 'EPERM']) {
      for (let n = 1; ; n++) {
        const path = join(folder(), 'ck');
        const saved = state(1);
        const options = { keepPrevious: true, dataFileAbove };
        for (const value of [1, 2]) {
          fill(saved, value);
          await saved.save(path, true, options);
        }
        fill(saved, 3);
        let error;
        const failed = await failing(n, code, async () => {
          error = await saved.save(path, true, options).then(() => undefined, (each) => each);
        });
        if (!failed) break;
        seen.add(failed);
        const at = `${code} of ${failed}, call ${n}`;
        const value = await valueOf(path);
        const names = readdirSync(dirname(path)).filter((name) => name.endsWith('.tmp'));
        assert.deepEqual(names, [], at);
        const before = await valueOf(`${path}.previous`).catch((each) => each.code);
        // With a data file the new elements go where those of the save before were.
        const allowed = dataFileAbove === 100 ? [1, 2, 'checkpoint-corrupt'] : [1, 2];
        if (error) {
          assert.ok(error instanceof OdtpackError && error.code === 'file-not-written', `${at}: ${error}`);
          const written = error.what.includes('written, but it may not survive a power cut');
          assert.equal(value, written ? 3 : 2, `${at}: ${error.what}`);
          assert.ok(written ? before === 2 : allowed.includes(before), `${at}: before ${before}`);
        } else {
          assert.deepEqual([value, before], [3, 2], at);
        }
        fill(saved, 4); // and the next save is as if nothing had been
        await saved.save(path, true, options);
        assert.deepEqual([await valueOf(path), await valueOf(`${path}.previous`)], [4, value], at);
      }
    }
    for (const name of ['openSync', 'writev', 'fsyncSync', 'linkSync', 'renameSync']) assert.ok(seen.has(name), name);
  });
}
