// What the pieces of the guide speak of.
using System;
using System.Collections.Generic;
using Odtpack;
class Ed25519PublicKeyParameters {
    public Ed25519PublicKeyParameters(byte[] key, int offset) { }
}
class Ed25519Signer {
    public void Init(bool signs, Ed25519PublicKeyParameters key) { }
    public void BlockUpdate(byte[] bytes, int offset, int count) { }
    public bool VerifySignature(byte[] signature) => false;
}
class Guide {
    IReadOnlyList<OrtValue>[] heldOut = null, batches = null;
    OrtValue[] batch = null;
    OrtValue image = null;
    bool isCharging = false;
    byte[] publicKey = null;
    void Use(TrainingPackage package, TrainingSession session) {
        /* use */
    }
    void Generate(TrainingPackage package, TrainingSession session) {
        /* generate */
    }
    void Sign() {
        /* sign */
        package.Dispose();
    }
    void Update(TrainingPackage newer) {
        /* update */
    }
}
