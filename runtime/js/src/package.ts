/** A package: its manifest, and files that are those which the manifest describes. */
import { platform } from '#platform';
import { hex } from './digest.js';
import { attempt, demand, fail, OdtpackError, requireArgument } from './errors.js';
import { isPath } from './json.js';
import { entries, type FileEntry, type Manifest, parseManifest } from './manifest.js';
import { checkPaths } from './paths.js';
import { inMemory, type OpenedFile, subtle } from './platform.js';

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
    readonly openFile: (path: string) => Promise<OpenedFile>,
  ) {}

  static async open(source: PackageSource, options: OpenOptions = {}): Promise<TrainingPackage> {
    const { open, name } = reader(source);
    const bytes = await open(name).then(whole).catch((error: unknown) => {
      if (!(error instanceof OdtpackError) || error.code === 'package-path') throw error;
      return fail('package-not-found', error.what, error.where,
        'odtpack build model.onnx --out package --loss cross_entropy');
    });
    if (options.publicKey !== undefined) {
      await checkSignature(bytes, open, name.slice(0, -MANIFEST.length), options.publicKey);
    }
    const manifest = parseManifest(bytes);
    checkPaths(entries(manifest).map(({ path }) => path));
    demand(manifest.target === undefined, 'package-target',
      'The package was built for onnxruntime-training, whose operators this ONNX Runtime lacks.',
      name, 'odtpack build without --target');
    demand(manifest.privacy === undefined, 'private-training',
      'The package is trained with private gradients, which this kit does not make.',
      name, 'train it with Python, or build it without privacy');
    const opened = new TrainingPackage(manifest, hex(await platform.sha256(bytes)), source, open);
    if (options.verify !== 'used') {
      for (const entry of entries(manifest)) (await opened.open(entry)).close();
    }
    return opened;
  }

  /** The bytes of a file, once they are those that the manifest describes. */
  async file(entry: FileEntry): Promise<Uint8Array> {
    const bytes = await whole(await this.openFile(entry.path));
    await this.#check(entry, inMemory(bytes));
    return bytes;
  }

  /** A file to read parts of, once it is the one that the manifest describes. */
  async open(entry: FileEntry): Promise<OpenedFile> {
    const file = await this.openFile(entry.path);
    try {
      await this.#check(entry, file);
    } catch (error) {
      file.close();
      throw error;
    }
    return file;
  }

  async #check(entry: FileEntry, file: OpenedFile): Promise<void> {
    const digest = file.bytes ? await platform.sha256(file.bytes) : file.sha256!();
    const isSame = file.size === entry.size_bytes && hex(digest) === entry.sha256;
    demand(isSame, 'package-changed',
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
    return extra.find(
      (f) => f.role === 'ort_model' && f.of === name && f.style === 'fixed' && f.platform === null,
    ) ?? fail('no-ort-model', `The package holds no ${name} in ORT format.`,
      String(this.source), 'odtpack ort package');
  }
}

function reader(source: PackageSource): { open: TrainingPackage['openFile']; name: string } {
  if (!isPath(source)) {
    requireArgument(typeof source?.get === 'function',
      'A package is the path or the address of its folder, or a Map of its files by path.');
    const open = async (path: string): Promise<OpenedFile> => inMemory(source.get(path) ??
      fail('package-incomplete', `The package lacks its file '${path}'.`));
    return { open, name: MANIFEST };
  }
  // The manifest's own path may carry a prefix.
  const [, folder, name] = /^(.*?)([^/\\]*manifest\.json)?$/s.exec(String(source))!;
  const root = source instanceof URL ? new URL(folder!) : folder || '.';
  return { open: (path) => platform.openIn(root, path), name: name ?? MANIFEST };
}

/** The bytes of a file, which is closed then. */
async function whole(file: OpenedFile): Promise<Uint8Array> {
  try {
    if (file.bytes) return file.bytes;
    const bytes = new Uint8Array(file.size);
    file.fill(bytes, 0);
    return bytes;
  } finally {
    file.close();
  }
}

async function checkSignature(
  manifest: Uint8Array, open: TrainingPackage['openFile'], prefix: string, publicKey: PublicKey,
): Promise<void> {
  const where = `${prefix}manifest.sig`;
  const signature = await attempt(() => open(where).then(whole), 'not-signed',
    'The package has no signature', where, 'odtpack sign');
  const [format, bytes] = typeof publicKey === 'string'
    ? ['spki', () => decodePem(publicKey)] as const
    : ['raw', () => Uint8Array.from(publicKey)] as const;
  const own = () => subtle().importKey(format, bytes(), { name: 'Ed25519' }, false, ['verify']);
  const key = await attempt(own, 'bad-key', 'That is not an Ed25519 public key', '',
    'pass the text of key.pub');
  const [given, signed] = [signature, manifest].map((each) => Uint8Array.from(each));
  demand(given!.length === 64 && (await subtle().verify({ name: 'Ed25519' }, key, given!, signed!)),
    'signature-wrong',
    'The manifest was not signed with the key that belongs to this one, or was changed since.',
    where, 'do not use this package, unless you can tell who signed it with which key');
}

function decodePem(text: string): Uint8Array<ArrayBuffer> {
  const inner = text.replace(/-----[A-Z ]+-----|\s/g, '');
  return Uint8Array.from(atob(inner), (character) => character.charCodeAt(0));
}
