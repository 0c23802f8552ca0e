/** A package: its manifest, and files that are those which the manifest describes. */
import { platform } from '#platform';
import { hex, subtle } from './digest.js';
import { OdtpackError, reason } from './errors.js';
import { entries, type FileEntry, type Manifest, parseManifest } from './manifest.js';
import { checkPaths } from './paths.js';
import type { OpenedFile } from './platform.js';

/** A folder (path in Node, address in a browser), a manifest's path, or the files by path. */
export type PackageSource = string | URL | ReadonlyMap<string, Uint8Array>;

/** PEM text (SubjectPublicKeyInfo) or the 32 bytes of an Ed25519 key. */
export type PublicKey = string | Uint8Array;

export interface OpenOptions {
  /** Check `manifest.sig` against this key. */
  publicKey?: PublicKey;
  /** Check every file now (`all`, the default), or each when it is `used`, as over a network. */
  verify?: 'all' | 'used';
}

const MANIFEST = 'manifest.json';

export type ModelName = 'training_model' | 'eval_model' | 'optimizer_model' | 'step_model';

export class TrainingPackage {
  private constructor(
    readonly manifest: Manifest,
    /** SHA-256 of the manifest in hex: what this package is, to the byte. */
    readonly sha256: string,
    readonly source: PackageSource,
    readonly read: (path: string) => Promise<Uint8Array>,
    readonly openFile: (path: string) => Promise<OpenedFile>,
  ) {}

  static async open(source: PackageSource, options: OpenOptions = {}): Promise<TrainingPackage> {
    const { read, open, name } = reader(source);
    const bytes = await read(name).catch((error: unknown) => {
      if (!(error instanceof OdtpackError) || error.code === 'package-path') throw error;
      const hint = 'odtpack build model.onnx --out package --loss cross_entropy';
      throw new OdtpackError('package-not-found', error.what, error.where, hint);
    });
    if (options.publicKey !== undefined) {
      await checkSignature(bytes, read, name.slice(0, -MANIFEST.length), options.publicKey);
    }
    const manifest = parseManifest(bytes);
    checkPaths(entries(manifest).map(({ path }) => path));
    if (manifest.target !== undefined) {
      throw new OdtpackError('package-target',
        'The package was built for onnxruntime-training, whose operators this ONNX Runtime lacks.',
        name, 'odtpack build without --target');
    }
    if (manifest.privacy !== undefined) {
      throw new OdtpackError('private-training',
        'The package is trained with private gradients, which this kit does not make.',
        name, 'train it with Python, or build it without privacy');
    }
    const opened = new TrainingPackage(manifest, await sha256(bytes), source, read, open);
    if (options.verify !== 'used') {
      for (const entry of entries(manifest)) (await opened.open(entry)).close();
    }
    return opened;
  }

  /** The bytes of a file, once they are those that the manifest describes. */
  async file(entry: FileEntry): Promise<Uint8Array> {
    const bytes = await this.read(entry.path);
    if (bytes.length !== entry.size_bytes || (await sha256(bytes)) !== entry.sha256) {
      this.#changed(entry);
    }
    return bytes;
  }

  /** A file to read parts of, once it is the one that the manifest describes. */
  async open(entry: FileEntry): Promise<OpenedFile> {
    const file = await this.openFile(entry.path);
    try {
      if (file.size !== entry.size_bytes || hex(await file.sha256()) !== entry.sha256) {
        this.#changed(entry);
      }
    } catch (error) {
      file.close();
      throw error;
    }
    return file;
  }

  #changed(entry: FileEntry): never {
    throw new OdtpackError('package-changed',
      `'${entry.path}' is not the file that the manifest describes.`, String(this.source),
      'copy or build the package again; save training progress outside the package');
  }

  /** A model: the .onnx file, or the one in ORT format of style `fixed` that runs everywhere. */
  async model(name: ModelName, format: 'onnx' | 'ort' = 'onnx'): Promise<Uint8Array> {
    return this.file(this.modelEntry(name, format));
  }

  modelEntry(name: ModelName, format: 'onnx' | 'ort'): FileEntry {
    const { extra, ...named } = this.manifest.files;
    const own = named[name];
    if (format === 'onnx' && own) return own;
    const entry = extra.find(
      (f) => f.role === 'ort_model' && f.of === name && f.style === 'fixed' && f.platform === null,
    );
    if (entry) return entry;
    throw new OdtpackError('no-ort-model', `The package holds no ${name} in ORT format.`,
      String(this.source), 'odtpack ort package');
  }
}

function reader(source: PackageSource): {
  read: TrainingPackage['read']; open: TrainingPackage['openFile']; name: string;
} {
  if (typeof source !== 'string' && !(source instanceof URL)) {
    const read = async (path: string): Promise<Uint8Array> => {
      const bytes = source.get(path);
      if (bytes) return bytes;
      throw new OdtpackError('package-incomplete', `The package lacks its file '${path}'.`);
    };
    return { read, open: async (path) => inMemory(await read(path)), name: MANIFEST };
  }
  // The manifest's own path may carry a prefix.
  const [, folder, name] = /^(.*?)([^/\\]*manifest\.json)?$/s.exec(String(source))!;
  const root = source instanceof URL ? new URL(folder!) : folder || '.';
  const read = (path: string): Promise<Uint8Array> => platform.readIn(root, path);
  const open = async (path: string): Promise<OpenedFile> =>
    platform.openIn?.(root, path) ?? inMemory(await read(path));
  return { read, open, name: name ?? MANIFEST };
}

function inMemory(bytes: Uint8Array): OpenedFile {
  return {
    size: bytes.length, bytes, sha256: () => platform.sha256(bytes), close: () => undefined,
    read: (target, at) => target.set(bytes.subarray(at, at + target.length)),
  };
}

async function sha256(bytes: Uint8Array): Promise<string> {
  return hex(await platform.sha256(bytes));
}

async function checkSignature(
  manifest: Uint8Array, read: TrainingPackage['read'], prefix: string, publicKey: PublicKey,
): Promise<void> {
  const where = `${prefix}manifest.sig`;
  const signature = await read(where).catch((error: unknown) => {
    const what = `The package has no signature: ${reason(error)}`;
    throw new OdtpackError('not-signed', what, where, 'odtpack sign');
  });
  let key: CryptoKey;
  try {
    const pem = typeof publicKey === 'string';
    const bytes = pem
      ? decodePem(publicKey)
      : Uint8Array.from(publicKey);
    const format = pem ? 'spki' : 'raw';
    key = await subtle().importKey(format, bytes, { name: 'Ed25519' }, false, ['verify']);
  } catch (error) {
    throw new OdtpackError('bad-key', `That is not an Ed25519 public key: ${reason(error)}`, '',
      'pass the text of key.pub');
  }
  const [own, signed] = [signature, manifest].map((each) => Uint8Array.from(each));
  if (own!.length !== 64 || !(await subtle().verify({ name: 'Ed25519' }, key, own!, signed!))) {
    throw new OdtpackError('signature-wrong',
      'The manifest was not signed with the key that belongs to this one, or was changed since.',
      where, 'do not use this package, unless you can tell who signed it with which key');
  }
}

function decodePem(text: string): Uint8Array<ArrayBuffer> {
  const inner = text.replace(/-----[A-Z ]+-----|\s/g, '');
  return Uint8Array.from(atob(inner), (character) => character.charCodeAt(0));
}
