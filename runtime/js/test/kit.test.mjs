// What the conformance suite does not ask: node --test test/
import assert from 'node:assert/strict';
import { createHash, generateKeyPairSync, sign } from 'node:crypto';
import { mkdtempSync, readdirSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import test from 'node:test';
import { Builder } from 'flatbuffers';
import {
  carryOver, CheckpointState, makeSchedule, OdtpackError, TrainingPackage,
} from '../dist/index.js';
import { readScheduleText, scheduleText } from '../dist/schedules.js';
import { trainedOf } from '../dist/adapter.js';
import { batchOf, checkBatch, countRight } from '../dist/batch.js';
import { converted, float16Bits, inferenceModel, widen } from '../dist/inference.js';
import { sessionOptions } from '../dist/runtime.js';
import { trainInWorker } from '../dist/worker.js';
import { pack } from '../dist/worker_calls.js';

const code = (expected) => (error) => {
  assert.ok(error instanceof OdtpackError, String(error));
  assert.equal(error.code, expected);
  return true;
};

function state(values, extra = {}) {
  const tensors = Object.entries(values).map(([name, list]) => {
    const data = Float32Array.from(list);
    return [name, { name, dtype: 'float32', requiresGrad: true, dims: [list.length], data }];
  });
  return new CheckpointState({
    parameters: new Map(tensors), nominal: false, optimizer: undefined, properties: new Map(),
    ...extra,
  });
}

async function bytes(blob) {
  return new Uint8Array(await blob.arrayBuffer());
}

test('properties keep their kinds through a file', async () => {
  const saved = state({ p: [1, 2] });
  saved.properties.set('count', 3);
  saved.properties.set('large', 2n ** 62n);
  saved.properties.set('rate', 0.1);
  saved.properties.set('whole', 2, 'float');
  saved.properties.set('text', 'grün');
  const { properties } = await CheckpointState.load(await bytes(await saved.toBlob()));
  assert.equal(properties.get('count'), 3);
  assert.equal(properties.get('large'), 2n ** 62n);
  assert.equal(properties.get('rate'), Math.fround(0.1));
  assert.equal(properties.get('text'), 'grün');
  assert.deepEqual([...properties.values].map(([name, { kind }]) => [name, kind]), [
    ['count', 'int'], ['large', 'int'], ['rate', 'float'], ['whole', 'float'], ['text', 'text'],
  ]);
  assert.throws(() => properties.set('x', 2n ** 63n), code('property-out-of-range'));
  assert.throws(() => properties.set('x', 1e300, 'float'), code('property-out-of-range'));
  assert.throws(() => properties.set('x', {}), code('property-type'));
  for (const [name, value, kind] of [
    ['', 1], [5, 1], [Symbol('x'), 1], [null, 1], ['x', 1, 'double'], ['x', 1, 'toString'], ['x', 'a', 'int'],
    ['x', 1, 'text'], ['x', 1.5, 'int'], ['x', true], ['x', null], ['x', Symbol('x')],
  ]) assert.throws(() => properties.set(name, value, kind), code('property-type'));
  for (const [name, value] of [['\ud800', 1], ['x', 'a\udfff']]) {
    assert.throws(() => properties.set(name, value), code('property-not-text'));
  }
  assert.deepEqual(properties.values.size, 5);
});

test('a checkpoint reads back, with and without a data file', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'kit-'));
  const saved = state({ a: [1, 2, 3], b: [4] });
  for (const limit of [2 ** 30, 4]) {
    const path = join(folder, `state-${limit}`);
    await saved.save(path, false, { dataFileAbove: limit });
    await saved.save(path, false, { dataFileAbove: limit }); // the second goes to the other end of the data file
    const read = await CheckpointState.load(path);
    assert.deepEqual(read.parameters.get('a').data, Float32Array.of(1, 2, 3));
  }
  assert.deepEqual(readdirSync(folder).sort(), ['state-1073741824', 'state-4', 'state-4.data']);
  await saved.save(join(folder, 'state-4'));
  assert.ok(!readdirSync(folder).includes('state-4.data'));
  const blob = await CheckpointState.load(await saved.toBlob());
  assert.deepEqual(blob.parameters.get('b').data, Float32Array.of(4));
  await assert.rejects(CheckpointState.load(join(folder, 'none')), code('checkpoint-not-found'));
  await assert.rejects(CheckpointState.load(folder), code('checkpoint-unreadable'));
  await assert.rejects(saved.save(join(folder, 'none', 'x')), code('file-not-written'));
});

test('the save before is kept, gone back to, and not lost to a damaged file', async () => {
  const path = join(mkdtempSync(join(tmpdir(), 'kit-')), 'trained');
  const saved = state({ p: [1, 2] });
  for (const value of [1, 2, 3]) {
    saved.parameters.get('p').data.fill(value);
    await saved.save(path, true, { keepPrevious: true });
  }
  const good = readFileSync(`${path}.previous`);
  writeFileSync(path, readFileSync(path).subarray(0, 100));
  const back = await CheckpointState.load(path);
  assert.match(back.recovered, /The save before it was loaded/);
  assert.deepEqual(back.parameters.get('p').data, Float32Array.of(2, 2));
  // The first save stands in for the damaged file; only the next moves it on.
  await back.save(path, true, { keepPrevious: true });
  assert.deepEqual(readFileSync(`${path}.previous`), good);
  const first = readFileSync(path);
  back.properties.set('again', 1);
  await back.save(path, true, { keepPrevious: true });
  assert.deepEqual(readFileSync(`${path}.previous`), first);
  assert.equal((await CheckpointState.load(path)).recovered, undefined);
  const both = [back.save(path), back.save(path)].map((each) => each.then(() => 0, (e) => e.code));
  assert.deepEqual(await Promise.all(both), [0, 'busy']);
  const saving = back.save(path);
  back.properties.set('again', 2); // after what is saved
  await saving;
  assert.equal((await CheckpointState.load(path)).properties.get('again'), 1);
});

test('a nominal state takes its values from another checkpoint of the model', async () => {
  const nominal = state({ p: [] }, { nominal: true });
  assert.throws(() => nominal.requireValues(), code('nominal-state'));
  const read = await CheckpointState.load(await bytes(await nominal.toBlob()));
  assert.equal(read.isNominal, true);
  await assert.rejects(read.loadParameters(await nominal.toBlob()), code('nominal-state'));
  const other = await state({ q: [1] }).toBlob();
  await assert.rejects(read.loadParameters(other), code('checkpoint-mismatch'));
  await read.loadParameters(await state({ p: [7] }).toBlob());
  assert.deepEqual(read.parameters.get('p').data, Float32Array.of(7));
  assert.equal(read.isNominal, false);
});

test('schedules are the formulas of the documentation, and text that Python reads', () => {
  const linear = makeSchedule('linear', { warmup_steps: 2, total_steps: 6 });
  assert.deepEqual([0, 1, 2, 4, 6, 9].map(linear.factor), [0, 0.5, 1, 0.5, 0, 0]);
  const cosine = makeSchedule('cosine', { total_steps: 4, floor: 0.5 });
  assert.deepEqual([0, 4, 8].map(cosine.factor), [1, 0.5, 0.5]);
  assert.ok(Math.abs(cosine.factor(2) - 0.75) < 1e-12);
  assert.equal(makeSchedule('step', { period: 3, gamma: 0.5 }).factor(7), 0.25);
  const multi = makeSchedule('multistep', { milestones: [2, 5], gamma: 0.5 });
  assert.deepEqual([1, 2, 5].map(multi.factor), [1, 0.5, 0.25]);
  assert.equal(
    scheduleText(cosine, 1),
    '{"floor": 0.5, "initial_lr": 1.0, "kind": "cosine", "total_steps": 4, "warmup_steps": 0}',
  );
  assert.match(scheduleText(multi, 1e-5), /"initial_lr": 1e-05, .*"milestones": \[2, 5\]/);
  assert.equal(readScheduleText(scheduleText(multi, 0.25)).initialRate, 0.25);
  for (const [kind, settings] of [
    ['none', {}], ['linear', {}], ['linear', { warmup_steps: 9, total_steps: 3 }],
    ['step', { period: 0 }], ['step', { period: 1, gamma: 2 }], ['constant', { period: 1 }],
    ['multistep', { milestones: [3, 1] }], ['toString', {}],
  ]) assert.throws(() => makeSchedule(kind, settings), code('bad-schedule'));
  // What stands in a checkpoint or a manifest need not be what its type says.
  for (const settings of [{ period: 1, gamma: '0.5' }, { period: { a: 1 } }, { period: [] }]) {
    assert.throws(() => makeSchedule('step', settings), code('bad-schedule'));
  }
  for (const floor of [null, '0.5', NaN, {}]) {
    assert.throws(() => makeSchedule('cosine', { total_steps: 4, floor }), code('bad-schedule'));
  }
  for (const text of [
    '[]', '[', '['.repeat(20_000), '{"kind": {}, "initial_lr": 1}', '{"kind": "constant"}',
    '{"kind": "constant", "initial_lr": -1}', '{"kind": "constant", "initial_lr": "1"}',
    '{"kind": "linear", "initial_lr": 1, "total_steps": {"__proto__": {"a": 1}}}',
    '{"kind": "constant", "kind": "constant", "initial_lr": 1}',
  ]) assert.throws(() => readScheduleText(text), code('bad-schedule'), text);
});

test('every float16 is itself, and ties round to even', () => {
  const all = Uint16Array.from({ length: 65536 }, (_, i) => i);
  widen(all).forEach((value, bits) => {
    if (!Number.isNaN(value)) assert.equal(float16Bits(value), bits);
  });
  assert.equal(float16Bits(1 + 2 ** -11), 0x3c00);
  assert.equal(float16Bits(1 + 3 * 2 ** -11), 0x3c02);
  assert.equal(float16Bits(2 ** -25), 0);
  assert.equal(float16Bits(65519.99), 0x7bff);
  assert.equal(float16Bits(65520), 0x7c00);
  const narrow = (...all) => converted({ dtype: 'float32', data: Float32Array.from(all) }, 'float16');
  assert.deepEqual([...narrow(1, 65519, -Infinity)], [0x3c00, 0x7bff, 0xfc00]);
  assert.throws(() => narrow(1, -65520), code('value-out-of-range'));
});

test('trained parameters go over to the next package, or nothing does', () => {
  const optimizer = {
    step: 3, learningRate: 0.5, groups: [], kind: 'adamw',
    moments: new Map([['a', [{ dtype: 'float32', dims: [2], data: Float32Array.of(5, 6) }]]]),
  };
  const trained = state({ a: [1, 2] }, { optimizer });
  const fresh = carryOver(trained, state({ a: [0, 0] }));
  assert.deepEqual(fresh.parameters.get('a').data, Float32Array.of(1, 2));
  assert.deepEqual(fresh.optimizer.moments.get('a')[0].data, Float32Array.of(5, 6));
  const wider = state({ a: [0, 0], b: [9] });
  assert.throws(() => carryOver(trained, wider), code('carry-over-optimizer'));
  assert.deepEqual(wider.parameters.get('a').data, Float32Array.of(0, 0));
  carryOver(trained, wider, undefined, false);
  assert.deepEqual(wider.parameters.get('a').data, Float32Array.of(1, 2));
  assert.throws(() => carryOver(trained, state({ a: [0] })), code('carry-over-parameter'));
});

test('a manifest is read strictly, and signatures count', async () => {
  const entry = { size_bytes: 0, sha256: createHash('sha256').digest('hex') }; // empty files
  const file = (path) => ({ ...entry, path });
  const good = {
    schema_version: 1,
    files: {
      training_model: file('t'), eval_model: file('e'), optimizer_model: file('o'),
      checkpoint: file('c'),
    },
    inputs: [], outputs: [{ name: 'loss', dtype: 'float32', shape: [], role: 'loss' }],
    parameters: [{ name: 'p', shape: [2], dtype: 'float32', role: 'trainable', offset: 0 }],
    optimizer: { kind: 'sgd' },
    layout: {
      dtype: 'float32', elements: 16, run: 'chunks', chunk_elements: 1024, inputs: ['params'], state: [],
    },
    later: { settings: 'are ignored' },
  };
  const files = (manifest) => new Map([
    ['manifest.json', new TextEncoder().encode(JSON.stringify(manifest))],
    ...['t', 'e', 'o', 'c'].map((name) => [name, new Uint8Array()]),
  ]);
  const opened = await TrainingPackage.open(files(good));
  const options = (own) => sessionOptions(opened.manifest, { env: { versions: { node: '1' } } }, own);
  for (const intraOpNumThreads of [257, -1, 1.5, '2']) {
    assert.throws(() => options({ intraOpNumThreads }), code('bad-argument'));
  }
  assert.equal(options({ intraOpNumThreads: 256 }).intraOpNumThreads, 256);
  assert.deepEqual(options({}), {
    graphOptimizationLevel: 'extended', enableMemPattern: false, enableCpuMemArena: true,
    executionMode: 'sequential', executionProviders: ['cpu'],
    extra: { session: { force_spinning_stop: '1' } },
  });
  const long = 'ä'.repeat(128);
  const paths = ['a.', ' a', 'a ', 'con', 'Aux.txt', 'lpt1.x', 'a\u202eb', long, 'a/'.repeat(600) + 'a',
    '..', '/c', 'a/../c', 'a\\c', 'C:c', 'T', 'manifest.json', 'a//c', 'a\u0000'];
  const group = { learning_rate_scale: 1, weight_decay: 0, parameters: ['q'] };
  const larger = { ...file('c'), size_bytes: 1 };
  for (const [change, expected] of [
    [{ schema_version: 2 }, 'manifest-version'], [{ schema_version: '1' }, 'manifest-invalid'],
    [{ files: undefined }, 'manifest-invalid'], [{ outputs: [] }, 'manifest-invalid'],
    [{ target: 'ort-training' }, 'package-target'],
    [{ parameters: [{ ...good.parameters[0], offset: 1 }] }, 'manifest-invalid'],
    [{ parameters: [{ ...good.parameters[0], offset: 16 }] }, 'manifest-invalid'],
    [{ parameters: [...good.parameters, ...good.parameters] }, 'manifest-invalid'],
    [{ groups: [group] }, 'manifest-invalid'],
    ...[
      { 'session.collect_node_memory_stats_to_file': '/tmp/x' }, { '__proto__.polluted': 'yes' },
      { 'constructor.assign': '1' }, { 'session.force_spinning_stop': '0' }, null, [],
    ].map((config) => [{ session: { optimization_level: 'all', config } }, 'manifest-invalid']),
    [{ session: { optimization_level: 'all', profile: 'x' } }, 'manifest-invalid'],
    [{ session: {} }, 'manifest-invalid'], [{ session: [] }, 'manifest-invalid'],
    ...[0, 257, 1.5, '1'].map((threads) => [
      { session: { optimization_level: 'all', threads } }, 'manifest-invalid',
    ]),
    ...[15, 17, 32, 2 ** 28].map((elements) => [
      { layout: { ...good.layout, elements } }, 'manifest-invalid',
    ]),
    ...[1, 1023, 2 ** 31].map((chunk) => [
      { layout: { ...good.layout, chunk_elements: chunk } }, 'manifest-invalid',
    ]),
    ...[0, -1, 1e300, 1e-60].map((scale) => [
      { groups: [{ ...group, parameters: ['p'], learning_rate_scale: scale }] }, 'manifest-invalid',
    ]),
    [{ schedule: { kind: 'step', settings: { period: 2, gamma: '0.5' } } }, 'manifest-invalid'],
    [{ schedule: { kind: 'cosine', settings: { floor: null } } }, 'manifest-invalid'],
    [{ inputs: [{ name: 'x', dtype: 'int64', shape: [2 ** 41], role: 'data' }] }, 'manifest-invalid'],
    [{ inputs: [{ name: 'x', dtype: 'int64', shape: Array(33).fill(1), role: 'data' }] },
      'manifest-invalid'],
    [{ outputs: Array(1025).fill(good.outputs[0]) }, 'manifest-invalid'],
    ...paths.map((path) => [
      { files: { ...good.files, checkpoint: file(path) } }, 'package-path',
    ]),
    [{ files: { ...good.files, checkpoint: larger } }, 'package-changed'],
    [{ files: { ...good.files, checkpoint: file('none') } }, 'package-incomplete'],
  ]) {
    const opening = TrainingPackage.open(files({ ...good, ...change }));
    await assert.rejects(opening, code(expected), JSON.stringify(change));
    assert.equal({}.polluted, undefined);
  }
  const text = JSON.stringify(good);
  const raw0 = (bytes) => new Map([...files(good), ['manifest.json', bytes]]);
  const utf8 = (each) => new TextEncoder().encode(each);
  for (const each of [
    utf8(`\ufeff${text}`), utf8(text.replace('{', '{"schema_version":1,')), utf8(`${text} 1`),
    utf8(text.replace('{', '{"a":"\\ud800",')), utf8(text.replace('{', '{"a":1e999,')),
    utf8(text.replace('{', `{"a":${'['.repeat(64)}${']'.repeat(64)},`)), utf8(text.slice(0, -1)),
    utf8(text.replace('{', `{"a":"${'x'.repeat(4 * 2 ** 20)}",`)), utf8(''),
    utf8(text.replace('{', '{"a":01,')), utf8(text.replace('{', '{"a":"\\x",')), Uint8Array.of(0x22, 0xff),
  ]) await assert.rejects(TrainingPackage.open(raw0(each)), code('manifest-invalid'));
  for (const each of [
    text.replace('"schema_version":1', '"schema_version":1.0'),
    text.replace('{', `{"a":${'['.repeat(63)}${']'.repeat(63)},"__proto__":{"b":1},`),
  ]) await TrainingPackage.open(raw0(utf8(each)));
  await assert.rejects(TrainingPackage.open(new Map()), code('package-not-found'));

  const { publicKey, privateKey } = generateKeyPairSync('ed25519');
  const pem = publicKey.export({ type: 'spki', format: 'pem' });
  await assert.rejects(TrainingPackage.open(files(good), { publicKey: pem }), code('not-signed'));
  const signed = files(good);
  signed.set('manifest.sig', new Uint8Array(sign(null, signed.get('manifest.json'), privateKey)));
  await TrainingPackage.open(signed, { publicKey: pem });
  const raw = publicKey.export({ type: 'spki', format: 'der' }).subarray(-32);
  await TrainingPackage.open(signed, { publicKey: new Uint8Array(raw) });
  const other = generateKeyPairSync('ed25519').publicKey.export({ type: 'spki', format: 'pem' });
  await assert.rejects(TrainingPackage.open(signed, { publicKey: other }), code('signature-wrong'));
  await assert.rejects(TrainingPackage.open(signed, { publicKey: 'no key' }), code('bad-key'));

  const folder = mkdtempSync(join(tmpdir(), 'kit-'));
  for (const [name, content] of files(good)) writeFileSync(join(folder, name), content);
  await TrainingPackage.open(folder);
  await TrainingPackage.open(join(folder, 'manifest.json'));
  const linked = mkdtempSync(join(tmpdir(), 'kit-'));
  for (const name of readdirSync(folder)) {
    if (name === 'c') symlinkSync(join(folder, name), join(linked, name));
    else writeFileSync(join(linked, name), readFileSync(join(folder, name)));
  }
  await assert.rejects(TrainingPackage.open(linked), code('package-path'));
});

test('names from outside are names, whatever objects have by that name', () => {
  const specs = ['__proto__', 'constructor', 'toString'].map((name) => {
    return { name, dtype: 'float32', shape: [1], role: 'data' };
  });
  const tensor = { type: 'float32', dims: [1], data: Float32Array.of(1) };
  const feeds = { ['__proto__']: tensor, constructor: tensor, toString: tensor };
  checkBatch(specs, batchOf(feeds));
  assert.deepEqual(Object.keys(batchOf(feeds)), ['__proto__', 'constructor', 'toString']);
  for (const odd of [{}, { ...feeds, other: tensor }, { ...feeds, '': tensor }]) {
    assert.throws(() => checkBatch(specs, batchOf(odd)), code('input-count'));
  }
  for (const odd of [null, 1, {}, [], 'x']) {
    assert.throws(() => checkBatch(specs, batchOf({ ...feeds, toString: odd })), code('input-type'));
  }
  for (const odd of [null, undefined, [tensor], 'x']) {
    assert.throws(() => batchOf(odd), code('input-count'));
  }
});

test('arrays that ONNX Runtime cannot read are refused, and it is said what to do', () => {
  const specs = [{ name: 'x', dtype: 'float32', shape: [2], role: 'data' }];
  const ort = { env: { versions: { node: '1' } }, Tensor: class { constructor(...all) { this.all = all; } } };
  const given = (data, more) => ({ x: { type: 'float32', dims: [2], data, ...more } });
  const gone = new Float32Array(2);
  structuredClone(gone, { transfer: [gone.buffer] });
  const shared = new Float32Array(new SharedArrayBuffer(8));
  for (const [data, expected] of [[gone, 'input-shape'], [shared, 'input-type']]) {
    for (const more of [{}, { location: 'cpu' }]) {
      assert.throws(() => checkBatch(specs, given(data, more), ort), (error) =>
        code(expected)(error) && error.hint.includes('array.slice()'));
    }
  }
  checkBatch(specs, given(shared.slice()), ort);
  checkBatch(specs, given(shared), { ...ort, env: { versions: { web: '1' } } }); // which copies it
  const onGpu = Object.defineProperty(given(0, { location: 'gpu-buffer' }).x, 'data', {
    get() { throw new Error('it is not on the processor'); } });
  checkBatch(specs, { x: onGpu }, ort);
  onGpu.type = 'int64';
  for (const [name, more, fits] of [['input_ids', {}, true], ['x', { class_count: 3 }, false]]) {
    const spec = { ...specs[0], name, dtype: 'int64', ...more };
    const check = () => checkBatch([spec], { [name]: onGpu }, ort);
    if (fits) check();
    else assert.throws(check, code('input-type'));
  }
});

test('arrays count by what they are, not by the name of their class', () => {
  const ort = { env: { versions: { node: '1' } }, Tensor: class { constructor(...all) { this.all = all; } } };
  const check = (dtype, data) => checkBatch([{ name: 'x', dtype, shape: [2], role: 'data' }],
    { x: { type: dtype, dims: [2], data } }, ort);
  for (const data of [Buffer.alloc(2), new Uint8Array(2), new Uint8ClampedArray(2)]) check('uint8', data);
  for (const data of [Buffer.alloc(2), new Uint8Array(2)]) check('bool', data);
  for (const [dtype, data] of [['bool', new Uint8ClampedArray(2)], ['uint8', new Int8Array(2)],
    ['int8', Buffer.alloc(2)], ['float32', new Uint16Array(2)]]) {
    assert.throws(() => check(dtype, data), code('input-type'));
  }
});

test('a template of tiny or nested fields costs what it has in bytes', () => {
  const manifest = { inference: { parameters: [] }, parameters: [] };
  const field = (tag, content) => {
    const length = [];
    let rest = content.length;
    for (; rest >= 128; rest = Math.floor(rest / 128)) length.push((rest % 128) | 128);
    return Uint8Array.from([tag, ...length, rest, ...content]);
  };
  const output = [0x62, 5, 0x0a, 3, 0x6f, 0x75, 0x74];
  const inner = new Uint8Array(4 * 2 ** 20 + output.length);
  for (let i = 0; i < 4 * 2 ** 20; i += 2) inner[i] = 0x08;
  inner.set(output, 4 * 2 ** 20);
  const head = [0x3a, 0x87, 0x80, 0x80, 0x02];
  const template = new Uint8Array(head.length + inner.length);
  template.set(head);
  template.set(inner, head.length);
  const before = process.memoryUsage().arrayBuffers + process.memoryUsage().heapUsed;
  const [found] = inferenceModel(manifest, template, state({}), ['out']);
  const after = process.memoryUsage().arrayBuffers + process.memoryUsage().heapUsed;
  assert.ok(after - before < 10 * template.length + 2 ** 26, String(after - before));
  assert.deepEqual(found, template);
  const tiny = new Uint8Array(4 * 2 ** 20).map((_, i) => (i % 2 ? 0 : 0x0a)); // empty ir_version fields
  assert.throws(() => inferenceModel(manifest, tiny, state({}), ['out']), code('unknown-output'));
  const many = new Uint8Array(2 ** 22);
  for (let i = 0; i < many.length; i += 4) many.set([0x62, 0, 0x08, 0], i); // outputs, and what is kept
  const [rest] = inferenceModel(manifest, Uint8Array.from([0x3a, 7, ...output,
    0x3a, 0x80, 0x80, 0x80, 0x02, ...many]), state({}), ['out']);
  assert.equal(rest.length, 9 + 5 + many.length / 2);
  const broken = field(0x3a, [0x62, 100, 1]);
  assert.throws(() => inferenceModel(manifest, broken, state({}), ['out']), code('package-changed'));
});

test('a table that occurs twice is refused before any list is made', async () => {
  const builder = new Builder(2 ** 22);
  const label = builder.createString('p');
  builder.startVector(8, 1, 8);
  builder.addInt64(0n);
  const dims = builder.endVector();
  builder.startObject(7);
  builder.addFieldOffset(0, label, 0);
  builder.addFieldOffset(2, dims, 0);
  builder.addFieldInt32(3, 1, 0);
  const tensor = builder.endObject();
  builder.startVector(4, 990_000, 4);
  for (let i = 0; i < 990_000; i++) builder.addOffset(tensor);
  const tensors = builder.endVector();
  builder.startObject(4);
  builder.addFieldOffset(0, tensors, 0);
  const module = builder.endObject();
  builder.startObject(4);
  builder.addFieldInt32(0, 2, 0);
  builder.addFieldOffset(1, module, 0);
  builder.finish(builder.endObject(), 'ODTC');
  const file = builder.asUint8Array();
  const start = performance.now();
  const before = process.memoryUsage().heapUsed;
  await assert.rejects(CheckpointState.load(file), (error) => {
    return code('checkpoint-corrupt')(error) && error.what.includes('occurs twice');
  });
  assert.ok(process.memoryUsage().heapUsed - before < 2 ** 26);
  assert.ok(performance.now() - start < 2000);
});

test('scores of float16 count as those of other types', () => {
  const manifest = {
    inputs: [{ name: 'labels', role: 'labels', dtype: 'int64', shape: ['batch'], class_count: 2 }],
    outputs: [{ name: 'loss', role: 'loss', dtype: 'float32', shape: [] },
      { name: 'scores', role: 'prediction', dtype: 'float16', shape: ['batch', 2] }],
    evaluation_outputs: [],
  };
  const labels = { type: 'int64', data: BigInt64Array.of(1n, 0n), dims: [2] };
  // As bits, -2 would be more than 1.
  const data = Uint16Array.of(...[-2, 1, 3, -3].map(float16Bits));
  const scores = { type: 'float16', data, dims: [2, 2] };
  assert.deepEqual(countRight(manifest, { labels }, { scores }), { right: 2, counted: 2 });
});

test('nothing is carried over from or to a state that is at work', async () => {
  const [one, other] = [state({ p: [1] }), state({ p: [2] })];
  await one.alone(async () => {
    assert.throws(() => carryOver(one, other), code('busy'));
    assert.throws(() => carryOver(other, one), code('busy'));
  });
  assert.deepEqual([...other.parameters.get('p').data], [2]);
});

test('a state of another package has no adapter of this one', async () => {
  const manifest = { adapter: {}, parameters: [
    { name: 'p', role: 'trainable', dtype: 'float32', shape: [2] },
    { name: 'table', role: 'frozen', dtype: 'float32', shape: [4] },
  ] };
  const opened = { manifest, source: '' };
  assert.deepEqual([...(await trainedOf(opened, state({ p: [1, 2] }))).keys()], ['p']);
  for (const values of [{ q: [1, 2] }, { p: [1] }, { p: [1, 2], q: [1] }]) {
    await assert.rejects(trainedOf(opened, state(values)), code('adapter-mismatch'));
  }
});

test('a worker ends once, whatever it answers, and later calls are closed', async (context) => {
  let [terminated, failing] = [0, ''];
  globalThis.location = new URL('http://localhost/');
  globalThis.Worker = class {
    postMessage({ id, method }) {
      if (method === 'fit') return; // it never answers
      const error = method === failing ? ['run-failed', 'It failed.', '', ''] : undefined;
      queueMicrotask(() => this.onmessage({ data: { id, value: method, error } }));
    }
    terminate() { terminated += 1; }
  };
  context.after(() => { delete globalThis.Worker; delete globalThis.location; });
  const session = await trainInWorker({ package: 'package' });
  assert.equal(await session.stepCount(), 'stepCount');
  const left = assert.rejects(session.fit(), code('closed'));
  await Promise.all([session.release(), session.release(), left]);
  await session.release();
  await assert.rejects(session.trainBatch({}), code('closed'));
  assert.equal(terminated, 1);
  failing = 'release';
  const other = await trainInWorker({ package: 'package' });
  await assert.rejects(other.release(), code('run-failed'));
  await assert.rejects(other.stepCount(), code('closed'));
  assert.equal(terminated, 2);
  failing = 'create';
  await assert.rejects(trainInWorker({ package: 'package' }), code('run-failed'));
  assert.equal(terminated, 3);
  globalThis.Worker = class {
    postMessage({ id, method, values }) {
      structuredClone(values);
      if (method === 'create' && values[0].package.endsWith('lost')) queueMicrotask(() => this.onerror({}));
      else queueMicrotask(() => this.onmessage({ data: { id } }));
    }
    terminate() {}
  };
  await assert.rejects(trainInWorker({ package: 'lost' }), (error) =>
    code('run-failed')(error) && error.what.includes('could not be loaded') && error.where.endsWith('worker.js'));
  const sent = await trainInWorker({ package: 'package' });
  assert.equal(sent.nope, undefined);
  assert.equal(sent.ort, undefined);
  await assert.rejects(sent.trainBatch({ input: () => 1 }), code('bad-argument'));
  await assert.rejects(trainInWorker({ package: 'package', format: () => 1 }), code('bad-argument'));
  await sent.lastNotFinite();
  await sent.saveCheckpoint({}, true, { keepPrevious: {} });
  const results = Object.assign(Object.create(null), { ['__proto__']: new (class {
    type = 'float32'; dims = [1]; get data() { return Float32Array.of(1); } })() });
  assert.deepEqual(Object.entries(pack(results)).map(([name, each]) => [name, Object.keys(each), each.data[0]]),
    [['__proto__', ['type', 'data', 'dims'], 1]]);
  const part = new Float32Array(100).subarray(3, 5);
  const { x } = pack({ x: { type: 'float32', data: part, dims: [2] } });
  assert.deepEqual([x.data.buffer.byteLength, [...x.data]], [8, [0, 0]]);
});
