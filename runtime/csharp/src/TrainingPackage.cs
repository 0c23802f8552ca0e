// A package: a folder whose files are those that its manifest describes (docs/formats/package.md).
using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;

namespace Odtpack {
    /// <summary>An input or output, as the manifest describes it.</summary>
    public sealed class TensorSpec {
        public string Name { get; }
        public string Role { get; }
        public TensorElementType ElementType { get; }
        /// <summary>-1 for what may vary.</summary>
        public IReadOnlyList<long> Shape { get; }
        /// <summary>Of labels; 0 if there is none.</summary>
        public long ClassCount { get; }
        public long? IgnoreIndex { get; }

        internal TensorSpec(NativeSpec spec) {
            Name = Native.Decode(spec.Name);
            Role = Native.Decode(spec.Role);
            ElementType = spec.Type;
            var shape = new long[(int)spec.Rank];
            if (shape.Length > 0) Marshal.Copy(spec.Shape, shape, 0, shape.Length);
            Shape = shape;
            ClassCount = spec.ClassCount;
            if (spec.HasIgnoreIndex != 0) IgnoreIndex = spec.IgnoreIndex;
        }
    }

    /// <summary>Whether a signature of 64 bytes is that of the manifest's bytes, made with
    /// Ed25519.</summary>
    public delegate bool SignatureCheck(byte[] manifest, byte[] signature);

    /// <summary>A package that is what its manifest says.</summary>
    public sealed class TrainingPackage : IDisposable {
        internal readonly PackageHandle Handle;

        public string Folder { get; }
        public IReadOnlyList<TensorSpec> Inputs { get; }
        public IReadOnlyList<TensorSpec> Outputs { get; }
        /// <summary>The outputs, and what the evaluation model alone returns.</summary>
        public IReadOnlyList<TensorSpec> EvaluationOutputs { get; }
        /// <summary>The parameters of the adapter, which is what an app sends or takes over of a
        /// state: see <see cref="CheckpointState.GetParameter"/> and
        /// <see cref="CheckpointState.CarryOver"/>. None without an adapter.</summary>
        public IReadOnlyList<TensorSpec> Adapter { get; }

        /// <summary>Open a folder; check its files' paths, sizes and hashes, and given a check,
        /// the signature.</summary>
        public static TrainingPackage Open(string folder, SignatureCheck check = null) =>
            new TrainingPackage(folder, check);

        TrainingPackage(string folder, SignatureCheck check) {
            var asked = new Asked { Check = check };
            var context = GCHandle.Alloc(asked);
            Ort.Load();
            try {
                var error = Native.odtpack_package_open(
                    Native.Encode(folder), check == null ? null : Callback,
                    GCHandle.ToIntPtr(context), out Handle);
                if (asked.Error != null) Native.odtpack_error_release(error);
                else Native.Call(error);
            } finally {
                context.Free();
            }
            if (asked.Error != null) throw asked.Error;
            Folder = folder;
            Inputs = Specs(0);
            Outputs = Specs(1);
            EvaluationOutputs = Specs(2);
            Adapter = Specs(4);
        }
        public void Dispose() => Handle.Dispose();

        /// <summary>The path of a file by its key in the manifest: "training_model", "checkpoint"
        /// and so on.</summary>
        public string Path(string key) {
            Native.Call(Native.odtpack_package_path(Handle, Native.Encode(key), out var path));
            return path.Take();
        }
        /// <summary>The path of the model that makes a whole step; null where steps of one batch
        /// are not made with one.</summary>
        public string StepModel() {
            Native.Call(Native.odtpack_package_step_model(Handle, out var path));
            return path.Take();
        }
        /// <summary>The path of a model in ORT format.</summary>
        public string OrtModel(string model, string style = "fixed", string platform = "") {
            Native.Call(Native.odtpack_package_ort_model(
                Handle, Native.Encode(model), Native.Encode(style), Native.Encode(platform),
                out var path));
            return path.Take();
        }
        /// <summary>The session options that the package asks for; 0 threads leave the choice to
        /// it.</summary>
        public SessionOptions SessionOptions(int threads = 0) {
            Native.Call(
                Native.odtpack_package_session_options(Handle, threads, out var options));
            return new SessionOptions(options);
        }
        /// <summary>Train a made-up batch for a few steps and compare with what the build
        /// measured: tells within seconds whether training is right on this device. Throws if
        /// not.</summary>
        public void SelfCheck() =>
            Native.Call(Native.odtpack_package_self_check(Handle, Ort.Api.Env));
        /// <summary>The same on the device of these options.</summary>
        public void SelfCheck(SessionOptions options) => Native.Call(
            Native.odtpack_package_self_check_with(Handle, Ort.Api.Env, options.Handle));

        TensorSpec[] Specs(int list) {
            var specs = new List<TensorSpec>();
            while (Native.odtpack_package_spec(Handle, list, (UIntPtr)specs.Count, out var spec))
                specs.Add(new TensorSpec(spec));
            return specs.ToArray();
        }

        sealed class Asked {
            internal SignatureCheck Check;
            internal Exception Error;
        }
        static readonly Native.Check Callback = IsSigned;

        [MonoPInvokeCallback(typeof(Native.Check))]
        static bool IsSigned(IntPtr context, IntPtr manifest, UIntPtr size, IntPtr signature) {
            var asked = (Asked)GCHandle.FromIntPtr(context).Target;
            try {
                return asked.Check(Bytes(manifest, (int)size), Bytes(signature, 64));
            } catch (Exception error) { // nothing may fly through native code
                asked.Error = error;
                return false;
            }
        }
        static byte[] Bytes(IntPtr start, int size) {
            var bytes = new byte[size];
            Marshal.Copy(start, bytes, 0, size);
            return bytes;
        }
    }
}
