// The app's ONNX Runtime: what the kit needs of its C API, under the names of its C# API.
using System;
using System.Runtime.InteropServices;

namespace Odtpack {
    public enum GraphOptimizationLevel {
        ORT_DISABLE_ALL = 0, ORT_ENABLE_BASIC = 1, ORT_ENABLE_EXTENDED = 2, ORT_ENABLE_ALL = 99
    }

    /// <summary>The functions of OrtApi, by their place in it, which never changes.</summary>
    internal sealed class Ort {
        static readonly Lazy<Ort> Loaded = new Lazy<Ort>(() => new Ort());
        internal static Ort Api => Loaded.Value;
        internal static void Load() => GC.KeepAlive(Api);

        internal readonly string Version;
        /// <summary>The environment, which is the process's and lives as long as it.</summary>
        internal readonly IntPtr Env;
        internal readonly IntPtr Cpu, Allocator;

        internal delegate IntPtr GetText(IntPtr of);
        internal delegate IntPtr GetVersion();
        internal delegate IntPtr GetApi(uint version);
        internal delegate void Release(IntPtr it);
        internal delegate IntPtr Create(out IntPtr made);
        internal delegate IntPtr CreateOptions(out OptionsHandle options);
        internal delegate IntPtr CreateEnv(int level, byte[] name, out IntPtr env);
        internal delegate IntPtr CreateMemoryInfo(int allocator, int type, out IntPtr info);
        internal delegate IntPtr SetNumber(OptionsHandle options, int number);
        internal delegate IntPtr AddEntry(OptionsHandle options, byte[] key, byte[] value);
        internal delegate IntPtr CreateValue(
            IntPtr info, IntPtr data, UIntPtr bytes, long[] shape, UIntPtr rank,
            TensorElementType type, out IntPtr value);
        internal delegate IntPtr GetPart(IntPtr of, out IntPtr part);
        internal delegate IntPtr GetElementType(IntPtr info, out TensorElementType type);
        internal delegate IntPtr GetSize(IntPtr info, out UIntPtr size);
        internal delegate IntPtr GetShape(IntPtr info, long[] shape, UIntPtr rank);
        internal delegate IntPtr GetCount(PredictorHandle session, out UIntPtr count);
        internal delegate IntPtr GetName(
            PredictorHandle session, UIntPtr index, IntPtr allocator, out IntPtr name);
        internal delegate IntPtr Free(IntPtr allocator, IntPtr memory);
        internal delegate IntPtr Run(
            PredictorHandle session, IntPtr options, IntPtr[] names, IntPtr[] inputs,
            UIntPtr count, IntPtr[] outputNames, UIntPtr outputCount, IntPtr[] outputs);

        readonly GetText errorMessage;
        readonly Release releaseStatus, releaseEnv;
        bool releases;
        internal readonly CreateOptions CreateSessionOptions;
        internal readonly SetNumber SetIntraOpNumThreads, SetSessionGraphOptimizationLevel;
        internal readonly AddEntry AddSessionConfigEntry;
        internal readonly CreateValue CreateTensorWithDataAsOrtValue;
        internal readonly GetPart GetTensorTypeAndShape, GetTensorMutableData;
        internal readonly GetElementType GetTensorElementType;
        internal readonly GetSize GetDimensionsCount;
        internal readonly GetShape GetDimensions;
        internal readonly GetCount SessionGetInputCount;
        internal readonly GetName SessionGetInputName;
        internal readonly Free AllocatorFree;
        internal readonly Run RunSession;
        internal readonly Release ReleaseInfo, ReleaseValue, ReleaseOptions, ReleaseSession;

        Ort() {
            var apiBase = Native.OrtGetApiBase();
            Native.Call(Native.odtpack_init(apiBase));
            Version = Native.Decode(Function<GetVersion>(apiBase, 1)());
            var api = Function<GetApi>(apiBase, 0)(17); // came with 1.17
            errorMessage = Function<GetText>(api, 2);
            RunSession = Function<Run>(api, 9);
            CreateSessionOptions = Function<CreateOptions>(api, 10);
            SetSessionGraphOptimizationLevel = Function<SetNumber>(api, 23);
            SetIntraOpNumThreads = Function<SetNumber>(api, 24);
            SessionGetInputCount = Function<GetCount>(api, 30);
            SessionGetInputName = Function<GetName>(api, 36);
            CreateTensorWithDataAsOrtValue = Function<CreateValue>(api, 49);
            GetTensorMutableData = Function<GetPart>(api, 51);
            GetTensorElementType = Function<GetElementType>(api, 60);
            GetDimensionsCount = Function<GetSize>(api, 61);
            GetDimensions = Function<GetShape>(api, 62);
            GetTensorTypeAndShape = Function<GetPart>(api, 65);
            AllocatorFree = Function<Free>(api, 76);
            releaseEnv = Function<Release>(api, 92);
            releaseStatus = Function<Release>(api, 93);
            ReleaseSession = Function<Release>(api, 95);
            ReleaseValue = Function<Release>(api, 96);
            ReleaseInfo = Function<Release>(api, 99);
            ReleaseOptions = Function<Release>(api, 100);
            AddSessionConfigEntry = Function<AddEntry>(api, 130);
            Native.odtpack_disable_telemetry(); // before the first environment is made
            Check(Function<CreateEnv>(api, 3)(3, Native.Encode("odtpack"), out Env));
            Check(Function<CreateMemoryInfo>(api, 69)(0, 0, out Cpu));
            Check(Function<Create>(api, 78)(out Allocator));
        }

        /// <summary>A plug-in's library may crash when a process ends that has it
        /// registered.</summary>
        internal void ReleaseAtExit() {
            if (releases) return;
            releases = true;
            AppDomain.CurrentDomain.ProcessExit += (sender, arguments) => releaseEnv(Env);
        }

        static T Function<T>(IntPtr table, int place) => Marshal.GetDelegateForFunctionPointer<T>(
            Marshal.ReadIntPtr(table, place * IntPtr.Size));

        /// <summary>Throw what a function reports.</summary>
        internal void Check(IntPtr status) {
            if (status == IntPtr.Zero) return;
            var message = Native.Decode(errorMessage(status));
            releaseStatus(status);
            throw new OdtpackException("run-failed", $"ONNX Runtime {Version}: {message}");
        }
    }

    internal sealed class OptionsHandle : Handle {
        protected override void Free(IntPtr it) => Ort.Api.ReleaseOptions(it);
    }

    /// <summary>
    /// The environment of ONNX Runtime, which is the process's. The kit keeps the library from
    /// sending telemetry, as its official builds do from 1.29 on: an app that wants that sets
    /// ORT_DISABLE_TELEMETRY to 0.
    /// </summary>
    public static class OrtEnv {
        /// <summary>The version of the app's ONNX Runtime.</summary>
        public static string GetVersionString() => Ort.Api.Version;
    }

    /// <summary>Options of a session, which the app may set as it likes.</summary>
    public sealed class SessionOptions : IDisposable {
        internal readonly OptionsHandle Handle;

        public SessionOptions() => Ort.Api.Check(Ort.Api.CreateSessionOptions(out Handle));
        internal SessionOptions(OptionsHandle handle) => Handle = handle;
        public void Dispose() => Handle.Dispose();

        public int IntraOpNumThreads {
            set => Ort.Api.Check(Ort.Api.SetIntraOpNumThreads(Handle, value));
        }
        public GraphOptimizationLevel GraphOptimizationLevel {
            set => Ort.Api.Check(Ort.Api.SetSessionGraphOptimizationLevel(Handle, (int)value));
        }
        /// <summary>Run on a plug-in of ONNX Runtime 1.23 or newer, a WebGPU library for example:
        /// its path, and the number of the device among those that it finds. Parameters, gradients
        /// and moments then live in the device's memory.</summary>
        public void AddDevice(string library, int index = 0) {
            Native.Call(Native.odtpack_add_device(
                Ort.Api.Env, Handle, Native.Encode(library), (UIntPtr)index));
            Ort.Api.ReleaseAtExit();
        }
        public void AddSessionConfigEntry(string key, string value) => Ort.Api.Check(
            Ort.Api.AddSessionConfigEntry(Handle, Native.Encode(key), Native.Encode(value)));
    }
}
