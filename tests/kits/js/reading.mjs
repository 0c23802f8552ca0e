// What the kit decides on files from outside: the corpus of tests/hostile, and checkpoints and
// manifests with what is read from them. In Node and in a browser; the caller passes the kit,
// `parseManifest`, ONNX Runtime, how to read a file, where a path lies, and SHA-256 in hex.

export async function* hostile({ kit, ort, read, at }) {
  const { cases } = JSON.parse(new TextDecoder().decode(await read('index.json')));
  const actions = {
    open: ({ package: source }) => kit.TrainingPackage.open(at(source)),
    checkpoint: ({ checkpoint }) => kit.CheckpointState.load(at(checkpoint)),
    session: async ({ package: source, checkpoint }) => {
      const checkpointState = await kit.CheckpointState.load(at(checkpoint));
      const session = await kit.TrainingSession.create({ package: at(source), checkpointState }, { ort });
      await session.release();
    },
  };
  for (const each of cases) {
    const polluted = Object.keys(Object.prototype);
    const outcome = await decide(kit, async () => void (await actions[each.action](each)));
    yield `${each.name}\t${polluted.length ? 'foreign:pollution' : outcome}`;
  }
}

export async function* readings({ kit, parseManifest, read, sha256 }, names) {
  for (const name of names) {
    const outcome = await decide(kit, async () => {
      const bytes = await read(name);
      if (name.endsWith('.json')) return parseManifest(bytes) && '-';
      return contentDigest(await kit.CheckpointState.load(bytes), sha256);
    });
    yield `${name}\t${outcome}`;
  }
}

async function decide(kit, act) {
  try {
    const found = await act();
    return found === undefined ? 'ok' : `ok\t${found}`;
  } catch (error) {
    return error instanceof kit.OdtpackError ? error.code : `foreign:${error?.constructor?.name}`;
  }
}

const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
const name = (text) => hex(new TextEncoder().encode(text));
const bytesOf = ({ buffer, byteOffset, byteLength }) => new Uint8Array(buffer, byteOffset, byteLength);

function float32(value) {
  const view = new DataView(new ArrayBuffer(4));
  view.setFloat32(0, value);
  return view.getUint32(0).toString(16).padStart(8, '0');
}

/** The digest of all that a checkpoint says, which is the same in every reader. */
async function contentDigest(state, sha256) {
  const byLabel = ([a], [b]) => (a < b ? -1 : Number(a > b));
  const lines = [];
  const parameters = [...state.parameters.values()].map((each) => [name(each.name), each]);
  for (const [label, { requiresGrad, dtype, dims, data }] of parameters.sort(byLabel)) {
    const shape = (!state.isNominal && dims.join('x')) || '-';
    const digest = await sha256(bytesOf(data));
    lines.push(`P ${requiresGrad ? 't' : 'f'} ${dtype} ${shape} ${digest} ${label}`);
  }
  const { optimizer } = state;
  if (optimizer) {
    lines.push(`O ${optimizer.step} ${float32(optimizer.learningRate)}`);
    const groups = optimizer.groups.length ? optimizer.groups : [[...optimizer.moments.keys()]];
    for (const [number, names] of groups.entries()) {
      for (const [label, each] of names.map((own) => [name(own), own]).sort(byLabel)) {
        for (const [i, moment] of (optimizer.moments.get(each) ?? []).entries()) {
          lines.push(`M ${number} momentum${i} ${await sha256(bytesOf(moment.data))} ${label}`);
        }
      }
    }
  }
  const texts = { int: String, float: float32, text: name };
  const properties = [...state.properties.values].map(([own, each]) => [name(own), each]);
  for (const [label, { kind, value }] of properties.sort(byLabel)) {
    lines.push(`V ${{ int: 'i', float: 'f', text: 's' }[kind]} ${texts[kind](value)} ${label}`);
  }
  return sha256(new TextEncoder().encode(lines.join('\n')));
}
