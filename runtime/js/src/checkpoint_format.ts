/** The checkpoint file, as docs/formats/checkpoint.md describes it: reader and writer. */
import type { Offset } from 'flatbuffers';
import { groupsOf, KINDS, Outline, PREFIX, TEXT_BYTES } from './digest.js';
import { demand, fail } from './errors.js';
import { FLOAT32, INT32, INT64, Source, Table, UINT32, Writer } from './flatbuffer.js';
import { type Bytes, inMemory, type OpenedCheckpoint, type Region } from './platform.js';
import {
  ARRAYS, bytesOf, CODES, type Dims, type DType, DTYPES, product, type Stored, type TypedArray,
  view,
} from './tensors.js';

export type PropertyKind = 'int' | 'float' | 'text';
export type Property = { readonly kind: PropertyKind; readonly value: bigint | number | string };

/** What an optimizer carries from step to step; without `kind` the file does not say which. */
export interface OptimizerState {
  step: number;
  learningRate: number;
  moments: Map<string, Stored[]>;
  groups: readonly (readonly string[])[];
  kind?: string | undefined;
}

/** One named tensor. `data` and `grad` are the memory that training works on. */
export interface Parameter {
  readonly name: string;
  readonly dtype: DType;
  readonly requiresGrad: boolean;
  dims: Dims;
  data: TypedArray;
  grad?: TypedArray;
}

/** The contents of a file. In a nominal one only names and types of the parameters count. */
export interface CheckpointData {
  parameters: Map<string, Parameter>;
  nominal: boolean;
  optimizer: OptimizerState | undefined;
  properties: Map<string, Property>;
  /** Whether the file carried a digest of all that it holds, which was right. */
  checked?: boolean;
}

const IDENTIFIER = 'ODTC';
const VERSION = 2;
export const OPTIMIZER_PROPERTY = 'odtpack.optimizer';
export const MAX_RANK = 32;
const MAX_ELEMENTS = 2 ** 48;
const PAYLOAD_ALIGNMENT = 16;
const [DOC_STRING, RAW_DATA] = [1, 4]; // numbers of the fields in Tensor
const DIGEST = 4; // number of the field in Checkpoint

/** What tensors without elements have in common. */
const NO_DATA = Object.fromEntries(
  Object.entries(ARRAYS).map(([name, array]) => [name, new array(0)]),
) as Record<DType, TypedArray>;
const DIGEST_TEXT = /^sha256:[0-9a-f]{64}$/;
/** As a file holds it: its length, the text, a zero byte. */
const STORED_DIGEST = /G\0\0\0sha256:[0-9a-f]{64}\0/g;
const SCANNED = 2 ** 16; // bytes of a file that are searched at once

export async function readCheckpoint(opened: OpenedCheckpoint): Promise<CheckpointData> {
  try {
    return await new Reader(opened).read();
  } finally {
    opened.close();
  }
}

/** The optimizer step of a file that may be damaged, if that can still be read. */
export function readStep(opened: OpenedCheckpoint): bigint | undefined {
  try {
    const [first] = new Source(opened.bytes, opened.where).root(IDENTIFIER).tables(2);
    return first?.number(INT64, 1, 0n);
  } catch {
    return undefined;
  } finally {
    opened.close();
  }
}

/** That region, if some lie there; throws if the file is damaged. */
export function externalRegion(bytes: Bytes, where: string): Region | undefined {
  const root = new Source(bytes, where).root(IDENTIFIER);
  const module = root.table(1);
  if (!module?.boolean(3)) return undefined;
  let [first, end] = [Infinity, 0];
  const use = (tensors: Iterable<Table>): void => {
    for (const tensor of tensors) {
      const offset = offsetOf(tensor);
      if (offset < 0) continue;
      const dtype = dtypeOf(tensor) ?? tensor.source.fail('a tensor has no known type');
      first = Math.min(first, offset);
      const nbytes = product(tensor.int64s(2, MAX_RANK)) * ARRAYS[dtype].BYTES_PER_ELEMENT;
      end = Math.max(end, offset + nbytes);
    }
  };
  use(module.tables(0));
  use(module.tables(1));
  for (const group of root.tables(2)) {
    for (const entry of group.tables(3)) use(entry.tables(1));
  }
  return end ? [first, end] : undefined;
}

/** Where the elements of a tensor begin in the data file; -1 if they are in the file itself. */
function offsetOf(tensor: Table): number {
  return Number(tensor.number(INT64, 6, -1n));
}

function dtypeOf(tensor: Table): DType | undefined {
  return DTYPES.get(tensor.number(INT32, 3, 0));
}

/** A tensor, and what a file calls it. */
type Named = Stored & { readonly name: string };

class Reader {
  readonly #source: Source;
  #data: Source | undefined;
  #nominal = false;
  readonly #parameters = new Map<string, Parameter>();
  readonly #shapes = new Map<string, Dims>(); // those of many tensors are one
  readonly #digests: string[] = []; // those that tensors carry, if any does
  readonly #bits = new Map<string, number>(); // of properties that are NaN

  constructor(readonly opened: OpenedCheckpoint) {
    this.#source = new Source(opened.bytes, opened.where);
  }

  async read(): Promise<CheckpointData> {
    const source: Source = this.#source;
    const root = source.root(IDENTIFIER);
    const version = root.number(INT32, 0, 0);
    demand(version === VERSION, 'checkpoint-version',
      `It is a checkpoint of version ${version}, and only version ${VERSION} can be read.`,
      this.opened.where,
      'write it again with ONNX Runtime training 1.17 or later, or with odtpack');
    const module = root.table(1) ?? source.fail('it has no module state');
    this.#nominal = module.boolean(2);
    const digest = root.string(DIGEST);
    if (module.boolean(3)) {
      const data = this.opened.data?.() ??
        source.fail('it refers to a data file, which is not here');
      this.#data = new Source(data, this.opened.where, Infinity);
    }
    const parameters = this.#parameters;
    for (const field of [0, 1]) {
      for (const [name, tensor] of this.#tensors(module.tables(field))) {
        if (parameters.has(name)) source.fail(`there are two parameters '${name}'`);
        parameters.set(name, { name, requiresGrad: field === 0, ...tensor });
      }
    }
    const optimizer = this.#optimizer(root);
    const properties = this.#properties(root.table(3));
    const data = { parameters, nominal: this.#nominal, optimizer, properties };
    const checked = await this.#check(digest, data);
    const kind = properties.get(OPTIMIZER_PROPERTY);
    properties.delete(OPTIMIZER_PROPERTY);
    if (optimizer && kind) {
      if (typeof kind.value !== 'string') return source.fail(`${OPTIMIZER_PROPERTY} is not text`);
      optimizer.kind = kind.value;
    }
    return { ...data, checked };
  }

  /** Compare with the digests that the file carries; false if it carries none. */
  async #check(digest: string, data: CheckpointData): Promise<boolean> {
    const marked = this.#digests.some((each) => each.startsWith(PREFIX));
    if (!digest) {
      if (marked || this.#holdsDigests(data.properties)) {
        this.#source.fail('it was written by odtpack, and lacks the digest that it had');
      }
      return false;
    }
    const outline = new Outline(data, this.#bits);
    if (digest === (await outline.digest())) return true;
    const odd = outline.names.filter((_, i) => marked && this.#digests[i] !== outline.ofTensor(i));
    const what = odd.slice(0, 10).map((name) => `'${name}'`).join(', ');
    return this.#source.fail('what is stored is not what was saved: ' +
      (what || 'its names, shapes, optimizer state or properties'));
  }

  /** Whether digests stand in a file that refers to none: two bytes may hide all of them. */
  #holdsDigests(properties: ReadonlyMap<string, Property>): boolean {
    const { bytes } = this.#source;
    let left = [...properties.values()].filter(({ value }) => DIGEST_TEXT.test(`${value}`)).length;
    for (let at = 0; at < bytes.size; at += SCANNED) {
      const piece = bytes.read(at, Math.min(SCANNED + TEXT_BYTES + 4, bytes.size - at));
      left -= new TextDecoder().decode(piece.slice()).match(STORED_DIGEST)?.length ?? 0;
    }
    return left < 0;
  }

  *#tensors(tables: Iterable<Table>): Generator<[string, Stored]> {
    for (const table of tables) {
      const name = table.string(0);
      if (!name) this.#source.fail('a parameter or moment has no name');
      const tensor = this.#tensor(name, table);
      if (!this.#nominal) this.#digests.push(table.string(DOC_STRING));
      yield [name, tensor];
    }
  }

  #tensor(name: string, table: Table): Stored {
    const source: Source = this.#source;
    const dtype = dtypeOf(table) ?? fail('checkpoint-dtype',
      `'${name}' has elements of ONNX type ${table.number(INT32, 3, 0)}, which are not supported.`,
      this.opened.where, "convert the model's parameters to float32 before building the package");
    let dims: Dims = table.int64s(2, MAX_RANK);
    if (dims.some((d) => d < 0) || product(dims.map((d) => Math.max(d, 1))) > MAX_ELEMENTS) {
      source.fail(`'${name}' has the impossible shape [${dims}]`);
    }
    const shape = String(dims);
    dims = this.#shapes.get(shape) ?? dims;
    this.#shapes.set(shape, dims);
    const raw = table.vector(RAW_DATA, 1) ?? { position: 0, length: 0 };
    const offset = offsetOf(table);
    const inline = offset === -1;
    if (table.vector(5, 4)) source.fail(`'${name}' holds strings`);
    if (this.#nominal) {
      source.demand(!dims.length && !raw.length && inline,
        `'${name}' has a value, and the state is marked as nominal`);
      return { dtype, dims: [0], data: NO_DATA[dtype] };
    }
    const nbytes = product(dims) * ARRAYS[dtype].BYTES_PER_ELEMENT;
    if (inline && raw.length !== nbytes) {
      source.fail(`'${name}' has ${raw.length} bytes and its shape asks for ${nbytes}`);
    }
    if (!inline && (!this.#data || raw.length)) {
      source.fail(`'${name}' may not refer to a data file`);
    }
    if (!nbytes) return { dtype, dims, data: NO_DATA[dtype] };
    let bytes = inline
      ? source.elements(raw.position, nbytes) : this.#data!.elements(offset, nbytes);
    // Memory of its own: a view of the file's would be misaligned and keep the file alive.
    if (bytes.byteOffset || bytes.buffer.byteLength !== nbytes) bytes = new Uint8Array(bytes);
    source.demand(dtype !== 'bool' || bytes.every((value) => value < 2),
      `'${name}' holds bools that are neither 0 nor 1`);
    return { dtype, dims, data: view(bytes.buffer, dtype, 0, nbytes) };
  }

  #optimizer(root: Table): OptimizerState | undefined {
    let [step, learningRate] = [0n, 0];
    const moments = new Map<string, Stored[]>();
    const groups: string[][] = [];
    for (const table of root.tables(2)) {
      const [own, rate] = [table.number(INT64, 1, 0n), table.number(FLOAT32, 2, 0)];
      if (!groups.length) [step, learningRate] = [own, rate];
      const counts = step >= 0n && step <= Number.MAX_SAFE_INTEGER;
      this.#source.demand(counts && Number.isFinite(learningRate),
        `the optimizer stands at step ${step} with rate ${learningRate}`);
      this.#source.demand(table.string(0) === `group${groups.length}`,
        'its optimizer groups are not called group0, group1, ...');
      this.#source.demand(own === step && rate === learningRate,
        'its optimizer groups stand at different steps or learning rates');
      groups.push(this.#moments(table, moments));
    }
    if (!groups.length) return undefined;
    const counts = new Set([...moments.values()].map((own) => own.length));
    const trained = [...this.#parameters.values()].filter(({ requiresGrad }) => requiresGrad);
    this.#source.demand(!moments.size || (moments.size === trained.length && counts.size === 1),
      'the optimizer state does not cover all trainable parameters alike');
    return { step: Number(step), learningRate, moments, groups: groups.length > 1 ? groups : [] };
  }

  #moments(group: Table, moments: Map<string, Stored[]>): string[] {
    const names: string[] = [];
    for (const entry of group.tables(3)) {
      const label = entry.string(0);
      const owner = this.#parameters.get(label);
      this.#source.demand(owner?.requiresGrad && !moments.has(label),
        `the optimizer state of '${label}' occurs twice or has no parameter`);
      const own: Stored[] = [];
      for (const [name, moment] of this.#tensors(entry.tables(1))) {
        const fits =
          moment.dtype === owner.dtype &&
          moment.dims.length === owner.dims.length &&
          moment.dims.every((size, axis) => size === 1 || size === owner.dims[axis]);
        if (name !== `momentum${own.length}` || !fits) {
          this.#source.fail(`the moment '${name}' of '${label}' has a wrong name, shape or type`);
        }
        own.push(moment);
      }
      moments.set(owner.name, own);
      names.push(owner.name);
    }
    return names;
  }

  #properties(bag: Table | undefined): Map<string, Property> {
    const properties = new Map<string, Property>();
    for (const [field, kind] of KINDS.entries()) {
      for (const table of bag?.tables(field) ?? []) {
        const name = table.string(0);
        this.#source.demand(name && !properties.has(name),
          `a property name, '${name}', is empty or occurs twice`);
        const value = kind === 'text' ? table.string(1)
          : kind === 'int' ? table.number(INT64, 1, 0n) : table.number(FLOAT32, 1, 0);
        if (Number.isNaN(value)) this.#bits.set(name, table.number(UINT32, 1, 0));
        properties.set(name, { kind, value });
      }
    }
    return properties;
  }
}

export function payloadBytes(data: CheckpointData): number {
  const moments = [...(data.optimizer?.moments.values() ?? [])].flat();
  const all: Stored[] = [...data.parameters.values(), ...moments];
  return data.nominal ? 0 : all.reduce((sum, each) => sum + each.data.byteLength, 0);
}

/**
 * The parts of a checkpoint file, in order, without a copy of the tensors; equal data give equal
 * bytes. With `externalFrom` the tensors belong into the data file, from that offset on.
 */
export function layCheckpoint(data: CheckpointData, externalFrom?: number) {
  const properties = new Map(data.properties);
  if (data.optimizer?.kind !== undefined) {
    properties.set(OPTIMIZER_PROPERTY, { kind: 'text', value: data.optimizer.kind });
  }
  const sorted = new Map([...properties].sort(([a], [b]) => (a < b ? -1 : 1)));
  const whole = { ...data, properties: sorted };
  const outline = new Outline(whole);
  const { head, pending, digested } = layHead(whole, externalFrom);

  // Offsets of a flatbuffer point forward, so the tables can name places after them.
  const file: Uint8Array[] = [head];
  const source = new Source(inMemory(head), 'checkpoint');
  const numbers = new DataView(head.buffer, head.byteOffset, head.length);
  let end = head.length;
  const append = (
    at: Offset, field: number, bytes: Uint8Array, alignment: number, length = bytes.length,
  ): void => {
    const slot = new Table(source, head.length - at).field(field, 4)!;
    const position = Math.ceil((end + 4) / alignment) * alignment;
    numbers.setUint32(slot, position - 4 - slot, true);
    const gap = new Uint8Array(position - end);
    new DataView(gap.buffer).setUint32(gap.length - 4, length, true);
    file.push(gap, bytes);
    end = position + bytes.length;
  };
  const inline = externalFrom === undefined ? pending : [];
  for (const { table: at, bytes } of inline) append(at, RAW_DATA, bytes, PAYLOAD_ALIGNMENT);
  const elements = file.length;
  const texts = digested.map(({ table: at, field }) => {
    const text = new Uint8Array(TEXT_BYTES + 1); // a zero byte ends it
    append(at, field, text, 4, TEXT_BYTES);
    return text;
  });
  return {
    file: file.slice(0, elements),
    data: externalFrom === undefined ? [] : pending.map(({ bytes }) => bytes),
    /** Hashes the tensors; the result ends the file. */
    async digests(): Promise<Uint8Array[]> {
      const ofAll = await outline.digest();
      texts.forEach((text, i) => {
        new TextEncoder().encodeInto(i === texts.length - 1 ? ofAll : outline.ofTensor(i), text);
      });
      return file.slice(elements);
    },
  };
}

/** The tables of a file, and those to which elements and digests are yet to be given. */
function layHead(data: CheckpointData, externalFrom: number | undefined) {
  const writer = new Writer(4096);
  const pending: { table: Offset; bytes: Uint8Array }[] = [];
  const digested: { table: Offset; field: number }[] = []; // the whole comes last
  const noBytes = ['Offset', writer.offsets([], 1)] as const;
  let external = BigInt(externalFrom ?? 0);

  const tensor = (stored: Named): Offset => {
    const label = writer.createSharedString(stored.name);
    const dims = writer.int64s(data.nominal ? [] : stored.dims);
    const bytes = bytesOf(stored.data);
    const kept = !data.nominal && bytes.length > 0;
    const offset = kept && externalFrom !== undefined ? external : -1n;
    const table = writer.table(
      ['Offset', label],
      data.nominal ? undefined : noBytes,
      ['Offset', dims],
      ['Int32', CODES[stored.dtype]],
      // With an offset raw_data stays absent: the reference looks no further if it is there.
      offset === -1n ? noBytes : undefined,
      undefined,
      ['Int64', offset, -1n],
    );
    if (offset !== -1n) external += BigInt(bytes.length);
    if (kept) pending.push({ table, bytes });
    if (!data.nominal) digested.push({ table, field: DOC_STRING });
    return table;
  };
  const tensors = (all: Named[]): Offset => writer.offsets(all.map(tensor));

  const [trainable, frozen] = [true, false].map((trained) =>
    tensors([...data.parameters.values()].filter(({ requiresGrad }) => requiresGrad === trained)));
  const module = writer.table(
    ['Offset', trainable!], ['Offset', frozen!], ['Int8', Number(data.nominal)],
    ['Int8', Number(externalFrom !== undefined)],
  );
  const groups = writer.offsets(groupsOf(data.optimizer).map((names, index) => {
    const { step, learningRate, moments } = data.optimizer!;
    const states = writer.offsets(names.map((name) => {
      const label = writer.createSharedString(name);
      const own = moments.get(name)!.map((each, i) => ({ ...each, name: `momentum${i}` }));
      return writer.table(['Offset', label], ['Offset', tensors(own)]);
    }));
    const label = writer.createSharedString(`group${index}`);
    return writer.table(['Offset', label], ['Int64', BigInt(step)], ['Float32', learningRate],
      ['Offset', states]);
  }));
  const properties = [...data.properties];
  const kinds = KINDS.map((wanted) =>
    writer.offsets(properties.filter(([, { kind }]) => kind === wanted).map(([name, { value }]) => {
      const label = writer.createString(name);
      return writer.table(['Offset', label],
        typeof value === 'string' ? ['Offset', writer.createString(value)]
        : typeof value === 'bigint' ? ['Int64', value] : ['Float32', value]);
    })));
  const bag = properties.length
    ? writer.table(...kinds.map((each) => ['Offset', each] as const)) : 0;
  const root = writer.table(
    ['Int32', VERSION], ['Offset', module], ['Offset', groups], ['Offset', bag], noBytes,
  );
  writer.finish(root, IDENTIFIER);
  digested.push({ table: root, field: DIGEST });
  return { head: writer.asUint8Array(), pending, digested };
}
