/** The checkpoint file, as docs/formats/checkpoint.md describes it: reader and writer. */
import { Builder, type Offset } from 'flatbuffers';
import { Outline, PREFIX, TEXT_BYTES } from './digest.js';
import { OdtpackError } from './errors.js';
import { type Bytes, inMemory, Source, Table, type Tables } from './flatbuffer.js';
import type { CheckpointParts, OpenedCheckpoint, Region } from './platform.js';
import {
  ARRAYS, bytesOf, type Dims, type DType, product, type Stored, type TypedArray, view,
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
const OPTIMIZER_PROPERTY = 'odtpack.optimizer';
export const MAX_RANK = 32;
const MAX_ELEMENTS = 2 ** 48;
const PAYLOAD_ALIGNMENT = 16;
const [DOC_STRING, RAW_DATA] = [1, 4]; // numbers of the fields in Tensor
const DIGEST = 4; // number of the field in Checkpoint

/** onnx.TensorProto.DataType */
export const CODES: Record<DType, number> = {
  float32: 1, uint8: 2, int8: 3, uint16: 4, int16: 5, int32: 6, int64: 7, bool: 9,
  float16: 10, float64: 11, uint32: 12, uint64: 13,
};
/** What tensors without elements have in common. */
const NO_DATA = Object.fromEntries(
  Object.entries(ARRAYS).map(([name, array]) => [name, new array(0)]),
) as Record<DType, TypedArray>;
const DIGEST_TEXT = /^sha256:[0-9a-f]{64}$/;
/** As a file holds it: its length, the text, a zero byte. */
const STORED_DIGEST = /G\0\0\0sha256:[0-9a-f]{64}\0/g;
const SCANNED = 2 ** 16; // bytes of a file that are searched at once
const KINDS: readonly PropertyKind[] = ['int', 'float', 'text']; // as a file lists them
export const DTYPES = new Map(Object.entries(CODES).map(([name, code]) => [code, name as DType]));

export async function readCheckpoint(opened: OpenedCheckpoint): Promise<CheckpointData> {
  try {
    const reader = new Reader(opened);
    const data = reader.read();
    return { ...data, checked: await reader.check(data.properties) };
  } finally {
    opened.close();
  }
}

/** The optimizer step of a file that may be damaged, if that can still be read. */
export function readStep(opened: OpenedCheckpoint): bigint | undefined {
  try {
    const [first] = new Source(opened.bytes, opened.where).root(IDENTIFIER).tables(2);
    return first?.int64(1);
  } catch {
    return undefined;
  } finally {
    opened.close();
  }
}

/** Where elements begin and end in the data file, if some lie there; throws if it is damaged. */
export function externalRegion(bytes: Bytes, where: string): Region | undefined {
  const root = new Source(bytes, where).root(IDENTIFIER);
  const module = root.table(1);
  if (!module?.boolean(3)) return undefined;
  let [first, end] = [Infinity, 0];
  const use = (tensors: Tables): void => {
    for (const tensor of tensors) {
      const offset = Number(tensor.int64(6, -1n));
      if (offset < 0) continue;
      const dtype = DTYPES.get(tensor.int32(3)) ?? tensor.source.fail('a tensor has no known type');
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

class Reader {
  readonly #source: Source;
  #data: Source | undefined;
  #nominal = false;
  #inlineLeft: number;
  #externalLeft = 0;
  #outline: Outline | undefined; // of a file with a digest
  #digest = '';
  #marked = false; // a tensor carries a digest
  readonly #shapes = new Map<string, Dims>(); // those of many tensors are one
  readonly #tables: number[] = []; // positions of the tensors that have a digest
  readonly #owners: string[] = [];

  constructor(readonly opened: OpenedCheckpoint) {
    this.#source = new Source(opened.bytes, opened.where);
    this.#inlineLeft = this.#source.bytes.size;
  }

  read(): CheckpointData {
    const source = this.#source;
    const root = source.root(IDENTIFIER);
    const version = root.int32(0);
    if (version !== VERSION) {
      throw new OdtpackError('checkpoint-version',
        `It is a checkpoint of version ${version}, and only version ${VERSION} can be read.`,
        this.opened.where,
        'write it again with ONNX Runtime training 1.17 or later, or with odtpack');
    }
    const module = root.table(1) ?? source.fail('it has no module state');
    this.#nominal = module.boolean(2);
    this.#digest = root.string(DIGEST);
    if (this.#digest) this.#outline = new Outline(this.#nominal);
    if (module.boolean(3)) {
      const data = this.opened.data?.() ?? source.fail('it refers to a data file, which is not here');
      this.#data = new Source(data, this.opened.where, Infinity);
      this.#externalLeft = data.size;
    }
    const parameters = new Map<string, Parameter>();
    for (const field of [0, 1]) {
      this.#tensors(module.tables(field), '', (name, { dtype, dims, data }) => {
        if (parameters.has(name)) source.fail(`there are two parameters '${name}'`);
        parameters.set(name, { name, dtype, requiresGrad: field === 0, dims, data });
      });
    }
    const optimizer = this.#optimizer(root, parameters);
    const properties = this.#properties(root.table(3));
    const kind = properties.get(OPTIMIZER_PROPERTY);
    if (optimizer && kind) {
      if (typeof kind.value !== 'string') return source.fail(`${OPTIMIZER_PROPERTY} is not text`);
      optimizer.kind = kind.value;
      properties.delete(OPTIMIZER_PROPERTY);
    }
    return { parameters, nominal: this.#nominal, optimizer, properties };
  }

  /** Compare with the digests that the file carries; false if it carries none. */
  async check(properties: Map<string, Property>): Promise<boolean> {
    if (!this.#outline) {
      if (this.#marked || this.#holdsDigests(properties)) {
        this.#source.fail('it was written by odtpack, and lacks the digest that it had');
      }
      return false;
    }
    if (this.#digest === (await this.#outline.digest())) return true;
    const again = new Source(this.opened.bytes, this.opened.where);
    const odd = !this.#marked ? [] : this.#tables.flatMap((position, i) => {
      const table = again.table(position);
      if (table.string(DOC_STRING) === this.#outline!.ofTensor(i)) return [];
      return `'${table.string(0)}${this.#owners[i] && ` of ${this.#owners[i]}`}'`;
    });
    const what = odd.slice(0, 10).join(', ') || 'its names, shapes, optimizer state or properties';
    return this.#source.fail(`what is stored is not what was saved: ${what}`);
  }

  /** Whether digests stand in a file that refers to none: two bytes may hide all of them. */
  #holdsDigests(properties: Map<string, Property>): boolean {
    const { bytes } = this.#source;
    let left = [...properties.values()].filter(({ value }) => DIGEST_TEXT.test(`${value}`)).length;
    for (let at = 0; at < bytes.size; at += SCANNED) {
      const piece = bytes.read(at, Math.min(SCANNED + TEXT_BYTES + 4, bytes.size - at));
      left -= new TextDecoder().decode(piece.slice()).match(STORED_DIGEST)?.length ?? 0;
    }
    return left < 0;
  }

  #tensors(tables: Tables, owner: string, take: (name: string, tensor: Stored) => void): void {
    this.#outline?.count(tables.length);
    for (const table of tables) {
      const name = table.string(0);
      if (!name) this.#source.fail('a parameter or moment has no name');
      const tensor = this.#tensor(name, table);
      this.#outline?.tensor(name, CODES[tensor.dtype], tensor.dims, tensor.data);
      if (!this.#nominal) {
        const said = table.string(DOC_STRING);
        this.#marked ||= said.startsWith(PREFIX);
        if (this.#outline) {
          this.#tables.push(table.position);
          this.#owners.push(owner);
        }
      }
      take(name, tensor);
    }
  }

  #tensor(name: string, table: Table): Stored {
    const source = this.#source;
    const code = table.int32(3);
    const dtype = DTYPES.get(code);
    if (!dtype) {
      throw new OdtpackError('checkpoint-dtype',
        `'${name}' has elements of ONNX type ${code}, which are not supported.`,
        this.opened.where,
        "convert the model's parameters to float32 before building the package");
    }
    let dims: Dims = table.int64s(2, MAX_RANK);
    if (dims.some((d) => d < 0) || product(dims.map((d) => Math.max(d, 1))) > MAX_ELEMENTS) {
      source.fail(`'${name}' has the impossible shape [${dims}]`);
    }
    const shape = String(dims);
    dims = this.#shapes.get(shape) ?? dims;
    this.#shapes.set(shape, dims);
    const raw = table.vector(RAW_DATA, 1);
    const offset = Number(table.int64(6, -1n));
    if (table.vector(5, 4)) source.fail(`'${name}' holds strings`);
    if (this.#nominal) {
      if (dims.length || raw?.length || offset !== -1) {
        source.fail(`'${name}' has a value, and the state is marked as nominal`);
      }
      return { dtype, dims: [0], data: NO_DATA[dtype] };
    }
    const nbytes = product(dims) * ARRAYS[dtype].BYTES_PER_ELEMENT;
    if (offset === -1) {
      if ((raw?.length ?? 0) !== nbytes) {
        source.fail(`'${name}' has ${raw?.length ?? 0} bytes and its shape asks for ${nbytes}`);
      }
      this.#inlineLeft -= nbytes;
    } else {
      if (!this.#data || raw?.length) source.fail(`'${name}' may not refer to a data file`);
      this.#externalLeft -= nbytes;
    }
    if (Math.min(this.#inlineLeft, this.#externalLeft) < 0) source.fail('its tensors overlap');
    if (!nbytes) return { dtype, dims, data: NO_DATA[dtype] };
    const inline = offset === -1;
    const position = inline ? (raw?.position ?? 0) : offset;
    let bytes = (inline ? source : this.#data!).read(position, nbytes);
    // Memory of its own: a view of the file's would be misaligned and keep the file alive.
    if (bytes.byteOffset || bytes.buffer.byteLength !== nbytes) bytes = new Uint8Array(bytes);
    if (dtype === 'bool' && bytes.some((value) => value > 1)) {
      source.fail(`'${name}' holds bools that are neither 0 nor 1`);
    }
    return { dtype, dims, data: view(bytes.buffer, dtype, 0, nbytes) };
  }

  #optimizer(
    root: Table, parameters: ReadonlyMap<string, Parameter>,
  ): OptimizerState | undefined {
    const tables = root.tables(2);
    this.#outline?.count(tables.length);
    if (!tables.length) return undefined;
    let [step, learningRate] = [0n, 0];
    const moments = new Map<string, Stored[]>();
    const groups: string[][] = [];
    for (const table of tables) {
      const index = groups.length;
      if (!index) [step, learningRate] = [table.int64(1), table.float32(2)];
      if (step < 0n || step > Number.MAX_SAFE_INTEGER || !Number.isFinite(learningRate)) {
        this.#source.fail(`the optimizer stands at step ${step} with rate ${learningRate}`);
      }
      if (table.string(0) !== `group${index}`) {
        this.#source.fail('its optimizer groups are not called group0, group1, ...');
      }
      if (table.int64(1) !== step || table.float32(2) !== learningRate) {
        this.#source.fail('its optimizer groups stand at different steps or learning rates');
      }
      this.#outline?.text(`group${index}`);
      this.#outline?.int64(step);
      this.#outline?.float32(learningRate);
      groups.push(this.#moments(table, parameters, moments));
    }
    const counts = new Set([...moments.values()].map((own) => own.length));
    const trained = [...parameters.values()].filter(({ requiresGrad }) => requiresGrad).length;
    if (moments.size && (moments.size !== trained || counts.size > 1)) {
      this.#source.fail('the optimizer state does not cover all trainable parameters alike');
    }
    return { step: Number(step), learningRate, moments, groups: groups.length > 1 ? groups : [] };
  }

  #moments(
    group: Table, parameters: ReadonlyMap<string, Parameter>, moments: Map<string, Stored[]>,
  ): string[] {
    const names: string[] = [];
    const entries = group.tables(3);
    this.#outline?.count(entries.length);
    for (const entry of entries) {
      const label = entry.string(0);
      this.#outline?.text(label);
      const owner = parameters.get(label);
      if (!owner?.requiresGrad || moments.has(label)) {
        this.#source.fail(`the optimizer state of '${label}' occurs twice or has no parameter`);
      }
      const own: Stored[] = [];
      this.#tensors(entry.tables(1), owner.name, (name, moment) => {
        const fits =
          moment.dtype === owner.dtype &&
          moment.dims.length === owner.dims.length &&
          moment.dims.every((size, axis) => size === 1 || size === owner.dims[axis]);
        if (name !== `momentum${own.length}` || !fits) {
          this.#source.fail(`the moment '${name}' of '${label}' has a wrong name, shape or type`);
        }
        own.push(moment);
      });
      moments.set(owner.name, own);
      names.push(owner.name);
    }
    return names;
  }

  #properties(bag: Table | undefined): Map<string, Property> {
    const properties = new Map<string, Property>();
    for (const [field, kind] of KINDS.entries()) {
      const tables = bag?.tables(field);
      this.#outline?.count(tables?.length ?? 0);
      for (const table of tables ?? []) {
        const name = table.string(0);
        if (!name || properties.has(name)) {
          this.#source.fail(`a property name, '${name}', is empty or occurs twice`);
        }
        this.#outline?.text(name);
        properties.set(name, { kind, value: this.#value(table, kind) });
      }
    }
    return properties;
  }

  #value(table: Table, kind: PropertyKind): Property['value'] {
    if (kind === 'float') {
      this.#outline?.float32Bits(table.uint32(1));
      return table.float32(1);
    }
    const value = kind === 'int' ? table.int64(1) : table.string(1);
    if (typeof value === 'string') this.#outline?.text(value);
    else this.#outline?.int64(value);
    return value;
  }
}

export function payloadBytes(data: CheckpointData): number {
  return data.nominal ? 0 : tensorsOf(data).reduce((sum, each) => sum + each.data.byteLength, 0);
}

function tensorsOf(data: CheckpointData): Stored[] {
  const moments = [...(data.optimizer?.moments.values() ?? [])].flat();
  return [...data.parameters.values(), ...moments];
}

/**
 * The parts of a checkpoint file, in order, without a copy of the tensors; equal data give equal
 * bytes. With `externalFrom` the tensors belong into the data file, from that offset on.
 */
export function layCheckpoint(data: CheckpointData, externalFrom?: number): CheckpointParts {
  const builder = new Builder(4096);
  const outline = new Outline(data.nominal);
  const pending: { table: Offset; bytes: Uint8Array }[] = [];
  const digested: { table: Offset; field: number }[] = []; // the whole comes last
  let external = externalFrom;

  const vector = (offsets: readonly Offset[], width = 4): Offset => {
    builder.startVector(width, offsets.length, 4);
    for (const offset of offsets.toReversed()) builder.addOffset(offset);
    return builder.endVector();
  };
  const table = (fields: number, fill: () => void): Offset => {
    builder.startObject(fields);
    fill();
    return builder.endObject();
  };
  const noBytes = vector([], 1);

  const tensor = ([name, stored]: readonly [string, Stored]): Offset => {
    const label = builder.createSharedString(name);
    const shape = data.nominal ? [] : stored.dims;
    builder.startVector(8, shape.length, 8);
    for (const size of shape.toReversed()) builder.addInt64(BigInt(size));
    const dims = builder.endVector();
    const bytes = bytesOf(stored.data);
    outline.tensor(name, CODES[stored.dtype], shape, stored.data);
    const kept = !data.nominal && bytes.length > 0;
    const offset = kept && external !== undefined ? external : -1;
    const at = table(7, () => {
      builder.addFieldOffset(0, label, 0);
      if (!data.nominal) builder.addFieldOffset(DOC_STRING, noBytes, 0);
      builder.addFieldOffset(2, dims, 0);
      builder.addFieldInt32(3, CODES[stored.dtype], 0);
      // With an offset raw_data stays absent: the reference looks no further if it is there.
      if (offset === -1) builder.addFieldOffset(RAW_DATA, noBytes, 0);
      builder.addFieldInt64(6, BigInt(offset), -1n);
    });
    if (offset !== -1) external! += bytes.length;
    if (kept) pending.push({ table: at, bytes });
    if (!data.nominal) digested.push({ table: at, field: DOC_STRING });
    return at;
  };
  const tensors = (all: readonly (readonly [string, Stored])[]): Offset => {
    outline.count(all.length);
    return vector(all.map(tensor));
  };

  const parameters = (requiresGrad: boolean): Offset =>
    tensors([...data.parameters].filter(([, each]) => each.requiresGrad === requiresGrad));
  const trainable = parameters(true);
  const frozen = parameters(false);
  const module = table(4, () => {
    builder.addFieldOffset(0, trainable, 0);
    builder.addFieldOffset(1, frozen, 0);
    builder.addFieldInt8(2, Number(data.nominal), 0);
    builder.addFieldInt8(3, Number(externalFrom !== undefined), 0);
  });
  const lay = { builder, outline, table, vector, tensors };
  const groups = vector(layGroups(lay, data.optimizer));
  const properties = new Map(data.properties);
  if (data.optimizer?.kind !== undefined) {
    properties.set(OPTIMIZER_PROPERTY, { kind: 'text', value: data.optimizer.kind });
  }
  const bag = layProperties(lay, properties);
  const root = table(5, () => {
    builder.addFieldInt32(0, VERSION, 0);
    builder.addFieldOffset(1, module, 0);
    builder.addFieldOffset(2, groups, 0);
    builder.addFieldOffset(3, bag, 0);
    builder.addFieldOffset(DIGEST, noBytes, 0);
  });
  builder.finish(root, IDENTIFIER);
  digested.push({ table: root, field: DIGEST });

  // Offsets of a flatbuffer point forward, so the tables can name places after them.
  const head = builder.asUint8Array();
  const file: Uint8Array[] = [head];
  const source = new Source(inMemory(head), 'checkpoint');
  const numbers = new DataView(head.buffer, head.byteOffset, head.length);
  let end = head.length;
  const append = (at: Offset, field: number, bytes: Uint8Array, alignment: number): void => {
    const slot = new Table(source, head.length - at).field(field, 4)!;
    const position = Math.ceil((end + 4) / alignment) * alignment;
    numbers.setUint32(slot, position - 4 - slot, true);
    const gap = new Uint8Array(position - end);
    new DataView(gap.buffer).setUint32(gap.length - 4, bytes.length, true);
    file.push(gap, bytes);
    end = position + bytes.length;
  };
  const inline = externalFrom === undefined ? pending : [];
  for (const { table: at, bytes } of inline) append(at, RAW_DATA, bytes, PAYLOAD_ALIGNMENT);
  const elements = file.length;
  const texts = digested.map(({ table: at, field }) => {
    const text = new Uint8Array(TEXT_BYTES);
    append(at, field, text, 4);
    file.push(Uint8Array.of(0)); // which ends a text
    end += 1;
    return text;
  });
  return {
    file: file.slice(0, elements),
    data: externalFrom === undefined ? [] : pending.map(({ bytes }) => bytes),
    async digests() {
      const whole = await outline.digest();
      texts.forEach((text, i) => {
        new TextEncoder().encodeInto(i === texts.length - 1 ? whole : outline.ofTensor(i), text);
      });
      return file.slice(elements);
    },
  };
}

/** What lays out a file, from its parts to the whole. */
interface Lay {
  readonly builder: Builder;
  readonly outline: Outline;
  table(fields: number, fill: () => void): Offset;
  vector(offsets: readonly Offset[]): Offset;
  tensors(all: readonly (readonly [string, Stored])[]): Offset;
}

function layGroups(
  { builder, outline, table, vector, tensors }: Lay, state: OptimizerState | undefined,
): Offset[] {
  const members = state?.groups.length ? state.groups : [[...(state?.moments.keys() ?? [])]];
  outline.count(state ? members.length : 0);
  if (!state) return [];
  return members.map((names, index) => {
    const kept = names.filter((name) => state.moments.has(name));
    outline.text(`group${index}`);
    outline.int64(BigInt(state.step));
    outline.float32(state.learningRate);
    outline.count(kept.length);
    const entries = kept.map((name) => {
      outline.text(name);
      const label = builder.createSharedString(name);
      const own = state.moments.get(name)!.map((each, i) => [`momentum${i}`, each] as const);
      const moments = tensors(own);
      return table(2, () => {
        builder.addFieldOffset(0, label, 0);
        builder.addFieldOffset(1, moments, 0);
      });
    });
    const states = vector(entries);
    const label = builder.createSharedString(`group${index}`);
    return table(4, () => {
      builder.addFieldOffset(0, label, 0);
      builder.addFieldInt64(1, BigInt(state.step), 0n);
      builder.addFieldFloat32(2, state.learningRate, 0);
      builder.addFieldOffset(3, states, 0);
    });
  });
}

function layProperties(
  { builder, outline, table, vector }: Lay, properties: Map<string, Property>,
): Offset {
  const sorted = [...properties].sort(([a], [b]) => (a < b ? -1 : 1));
  const vectors = KINDS.map((wanted) => {
    const entries = sorted.filter(([, { kind }]) => kind === wanted);
    outline.count(entries.length);
    return vector(entries.map(([name, { kind, value }]) => {
      outline.text(name);
      const label = builder.createString(name);
      const text = kind === 'text' ? builder.createString(value as string) : 0;
      if (kind === 'text') outline.text(value as string);
      else if (kind === 'float') outline.float32(value as number);
      else outline.int64(value as bigint);
      return table(2, () => {
        builder.addFieldOffset(0, label, 0);
        if (kind === 'text') builder.addFieldOffset(1, text, 0);
        else if (kind === 'float') builder.addFieldFloat32(1, value as number, 0);
        else builder.addFieldInt64(1, value as bigint, 0n);
      });
    }));
  });
  if (!properties.size) return 0;
  return table(3, () => vectors.forEach((each, index) => builder.addFieldOffset(index, each, 0)));
}
