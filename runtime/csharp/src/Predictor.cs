using System;
using System.Collections.Generic;
using System.Linq;

namespace Odtpack {
    internal sealed class PredictorHandle : Handle {
        protected override void Free(IntPtr it) => Ort.Api.ReleaseSession(it);
    }

    /// <summary>Predicts with a copy of a state's parameters.</summary>
    public sealed unsafe class Predictor : IDisposable {
        readonly PredictorHandle handle;

        public IReadOnlyList<string> InputNames { get; }
        public IReadOnlyList<string> OutputNames { get; }

        internal Predictor(PredictorHandle handle, IReadOnlyCollection<string> outputNames) {
            this.handle = handle;
            OutputNames = new List<string>(outputNames);
            var ort = Ort.Api;
            ort.Check(ort.SessionGetInputCount(handle, out var count));
            var names = new string[(int)count];
            for (var i = 0; i < names.Length; ++i) {
                ort.Check(
                    ort.SessionGetInputName(handle, (UIntPtr)i, ort.Allocator, out var name));
                names[i] = Native.Decode(name);
                ort.Check(ort.AllocatorFree(ort.Allocator, name));
            }
            InputNames = names;
        }
        public void Dispose() => handle.Dispose();

        /// <summary>The outputs for inputs in the order of <see cref="InputNames"/>. Dispose of
        /// them.</summary>
        public IDisposableReadOnlyCollection<OrtValue> Run(IReadOnlyList<OrtValue> inputs) {
            if (inputs == null || inputs.Contains(null))
                throw new ArgumentNullException(nameof(inputs));
            if (inputs.Count != InputNames.Count)
                throw new OdtpackException(
                    "input-count", $"{inputs.Count} inputs were given for "
                    + string.Join(", ", InputNames));
            var outputs = new IntPtr[OutputNames.Count];
            var held = 0;
            using (var given = new Names(InputNames))
            using (var wanted = new Names((List<string>)OutputNames)) {
                try {
                    var values = new IntPtr[inputs.Count];
                    for (; held < values.Length; ++held) {
                        var isHeld = false;
                        inputs[held].Handle.DangerousAddRef(ref isHeld);
                        values[held] = inputs[held].Handle.DangerousGetHandle();
                    }
                    Ort.Api.Check(Ort.Api.RunSession(
                        handle, IntPtr.Zero, given.Pointers, values, given.Count, wanted.Pointers,
                        wanted.Count, outputs));
                } finally {
                    while (held-- > 0) inputs[held].Handle.DangerousRelease();
                }
            }
            fixed (IntPtr* made = outputs) return new Values(made, outputs.Length);
        }
    }
}
