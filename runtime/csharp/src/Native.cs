// The C interface of the C++ kit (odtpack.h).
using System;
using System.Collections.Generic;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;
using System.Text;
using Microsoft.Win32.SafeHandles;

// The tests use the assembly of the NuGet package, and compare all of a state.
[assembly: InternalsVisibleTo("OdtpackTests")]

namespace Odtpack {
    /// <summary>IL2CPP finds by this name what native code may call.</summary>
    [AttributeUsage(AttributeTargets.Method)]
    internal sealed class MonoPInvokeCallbackAttribute : Attribute {
        public MonoPInvokeCallbackAttribute(Type type) { }
    }

    /// <summary>A handle is counted in each call that takes it: one that is freed during a call of
    /// another thread, or by the garbage collector, is freed when that call is over.</summary>
    internal abstract class Handle : SafeHandleZeroOrMinusOneIsInvalid {
        protected Handle() : base(true) { }
        protected abstract void Free(IntPtr it);
        protected override bool ReleaseHandle() {
            Free(handle);
            return true;
        }
    }
    internal sealed class PackageHandle : Handle {
        protected override void Free(IntPtr it) => Native.odtpack_package_release(it);
    }
    internal sealed class StateHandle : Handle {
        protected override void Free(IntPtr it) => Native.odtpack_state_release(it);
    }
    internal sealed class SessionHandle : Handle {
        protected override void Free(IntPtr it) => Native.odtpack_session_release(it);
    }

    internal sealed class GeneratorHandle : Handle {
        protected override void Free(IntPtr it) => Native.odtpack_generator_release(it);
    }
    internal sealed class TokensHandle : Handle {
        protected override void Free(IntPtr it) => Native.odtpack_tokens_release(it);
    }

    internal struct NativeText {
        public IntPtr Bytes;
        public UIntPtr Size;

        /// <summary>As a string, null if there is none; what was handed out is freed.</summary>
        public string Take() {
            var text = Bytes == IntPtr.Zero ? null : Native.Decode(Bytes, (int)Size);
            Native.odtpack_free(Bytes);
            return text;
        }
    }
    internal struct NativeSpec {
        public IntPtr Name, Role;
        public TensorElementType Type;
        public IntPtr Shape;
        public UIntPtr Rank;
        public long ClassCount;
        public byte HasIgnoreIndex;
        public long IgnoreIndex;
    }
    internal struct NativeSchedule {
        public IntPtr Kind;
        public long WarmupSteps, TotalSteps, Period;
        public double Floor, Gamma;
        public IntPtr Milestones;
        public UIntPtr MilestoneCount;
    }
    internal struct NativeProperty {
        public int Kind; // 0: whole, 1: real, 2: text
        public long Whole;
        public float Real;
        public NativeText Text;
    }
    internal struct NativeModels {
        public IntPtr Training, Evaluation, Optimizer, Step;
    }
    internal struct NativeEvaluation {
        public double LossSum;
        public long Samples, Right, Labels;
    }
    internal struct NativeGenerateOptions {
        public IntPtr Adapter;
        public long MaxTokens;
        public IntPtr Stop;
        public UIntPtr StopCount;
        public double Temperature;
        public ulong TopK;
        public double TopP;
        public ulong Seed;
    }
    internal enum RunKind { StepOn = 0, TrainStep = 1, EvalStep = 2 }

    internal static unsafe class Native {
#if ODTPACK_STATIC || (UNITY_IOS && !UNITY_EDITOR)
        internal const string Library = "__Internal", OnnxRuntime = "__Internal";
#else
        internal const string Library = "odtpack", OnnxRuntime = "onnxruntime";
#endif
        static readonly UTF8Encoding Utf8 = new UTF8Encoding(false, true);

        /// <summary>Throw the error that a call returned.</summary>
        internal static void Call(IntPtr error) {
            if (error == IntPtr.Zero) return;
            try {
                throw new OdtpackException(
                    Decode(odtpack_error_code(error)), Decode(odtpack_error_message(error)),
                    Decode(odtpack_error_place(error)), Decode(odtpack_error_hint(error)));
            } finally {
                odtpack_error_release(error);
            }
        }
        internal static string Decode(IntPtr bytes, int size) =>
            Encoding.UTF8.GetString((byte*)bytes, size);
        internal static string Decode(IntPtr text) {
            var size = 0;
            while (((byte*)text)[size] != 0) ++size;
            return Decode(text, size);
        }
        /// <summary>A string as C takes it; a zero follows its bytes.</summary>
        internal static byte[] Encode(string text) {
            if (text == null) throw new ArgumentNullException(nameof(text));
            try {
                if (text.IndexOf('\0') < 0) return Utf8.GetBytes(text + '\0');
            } catch (EncoderFallbackException) { }
            throw new OdtpackException(
                "bad-argument", "A text has a zero, or half a character, in it.");
        }
        internal static byte[] Optional(string text) => text == null ? null : Encode(text);

        [DllImport(OnnxRuntime)]
        internal static extern IntPtr OrtGetApiBase();

        const CallingConvention C = CallingConvention.Cdecl;
        const UnmanagedType Byte = UnmanagedType.I1;

        [DllImport(Library, CallingConvention = C)]
        internal static extern void odtpack_free(IntPtr memory);
        [DllImport(Library, CallingConvention = C)]
        static extern IntPtr odtpack_error_code(IntPtr error);
        [DllImport(Library, CallingConvention = C)]
        static extern IntPtr odtpack_error_message(IntPtr error);
        [DllImport(Library, CallingConvention = C)]
        static extern IntPtr odtpack_error_place(IntPtr error);
        [DllImport(Library, CallingConvention = C)]
        static extern IntPtr odtpack_error_hint(IntPtr error);
        [DllImport(Library, CallingConvention = C)]
        internal static extern void odtpack_error_release(IntPtr error);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_init(IntPtr apiBase);
        [DllImport(Library, CallingConvention = C)]
        internal static extern void odtpack_disable_telemetry();

        [UnmanagedFunctionPointer(C)]
        [return: MarshalAs(Byte)]
        internal delegate bool Check(IntPtr context, IntPtr manifest, UIntPtr size, IntPtr mark);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_package_open(
            byte[] folder, Check check, IntPtr context, out PackageHandle package);
        [DllImport(Library, CallingConvention = C)]
        internal static extern void odtpack_package_release(IntPtr package);
        [DllImport(Library, CallingConvention = C)]
        [return: MarshalAs(Byte)]
        internal static extern bool odtpack_package_spec(
            PackageHandle package, int list, UIntPtr index, out NativeSpec spec);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_package_path(
            PackageHandle package, byte[] key, out NativeText path);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_package_step_model(
            PackageHandle package, out NativeText path);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_package_ort_model(
            PackageHandle package, byte[] model, byte[] style, byte[] platform,
            out NativeText path);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_package_session_options(
            PackageHandle package, int threads, out OptionsHandle options);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_package_self_check(PackageHandle package, IntPtr env);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_package_self_check_with(
            PackageHandle package, IntPtr env, OptionsHandle options);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_add_device(
            IntPtr env, OptionsHandle options, byte[] library, UIntPtr index);

        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_schedule_check(ref NativeSchedule schedule);
        [DllImport(Library, CallingConvention = C)]
        internal static extern double odtpack_schedule_factor(
            ref NativeSchedule schedule, long step);

        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_state_load(byte[] path, out StateHandle state);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_state_load_buffer(
            byte[] bytes, UIntPtr size, out StateHandle state);
        [DllImport(Library, CallingConvention = C)]
        internal static extern void odtpack_state_release(IntPtr state);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_state_save(
            StateHandle state, byte[] path, [MarshalAs(Byte)] bool optimizerState,
            [MarshalAs(Byte)] bool keepPrevious);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_state_recovered(
            StateHandle state, out NativeText text);
        [DllImport(Library, CallingConvention = C)]
        [return: MarshalAs(Byte)]
        internal static extern bool odtpack_state_is_checked(StateHandle state);
        [DllImport(Library, CallingConvention = C)]
        [return: MarshalAs(Byte)]
        internal static extern bool odtpack_state_is_nominal(StateHandle state);
        [DllImport(Library, CallingConvention = C)]
        internal static extern UIntPtr odtpack_state_property_count(StateHandle state);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_state_property_at(
            StateHandle state, UIntPtr index, out NativeText name, out NativeProperty property);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_state_set_property(
            StateHandle state, byte[] name, NativeProperty* property);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_state_get_property(
            StateHandle state, byte[] name, out NativeProperty property);
        [DllImport(Library, CallingConvention = C)]
        internal static extern UIntPtr odtpack_state_parameter_count(StateHandle state);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_state_parameter_info(
            StateHandle state, UIntPtr index, out NativeText name, out byte trainable,
            out TensorElementType type);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_state_parameter(
            StateHandle state, UIntPtr index, out IntPtr value, out IntPtr memory);
        [DllImport(Library, CallingConvention = C)]
        internal static extern void odtpack_memory_release(IntPtr memory);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_state_load_parameters(StateHandle state, byte[] path);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_state_carry_over(
            StateHandle state, StateHandle trained, IntPtr[] names, UIntPtr count,
            [MarshalAs(Byte)] bool optimizerState);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_adapter_save(
            PackageHandle package, StateHandle state, byte[] path);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_adapter_load(
            PackageHandle package, StateHandle state, byte[] path);

        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_create(
            IntPtr env, OptionsHandle options, int threads, PackageHandle package,
            StateHandle state, NativeModels* models, out SessionHandle session);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_close(SessionHandle session);
        [DllImport(Library, CallingConvention = C)]
        internal static extern void odtpack_session_release(IntPtr session);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_run(
            SessionHandle session, RunKind run, IntPtr* inputs, UIntPtr count, IntPtr* outputs,
            ref UIntPtr outputCount);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_train_batch(
            SessionHandle session, IntPtr* inputs, UIntPtr count, out double loss);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_eval_batch(
            SessionHandle session, IntPtr* inputs, UIntPtr count, NativeEvaluation* sum);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_lazy_reset_grad(SessionHandle session);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_optimizer_step(SessionHandle session);
        [DllImport(Library, CallingConvention = C)]
        [return: MarshalAs(Byte)]
        internal static extern bool odtpack_session_has_step_model(SessionHandle session);
        [DllImport(Library, CallingConvention = C)]
        [return: MarshalAs(Byte)]
        internal static extern bool odtpack_session_has_kernels(SessionHandle session);
        [DllImport(Library, CallingConvention = C)]
        internal static extern long odtpack_session_accumulation_steps(SessionHandle session);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_step_count(
            SessionHandle session, out long count);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_set_stops_on_not_finite(
            SessionHandle session, [MarshalAs(Byte)] bool stops);
        [DllImport(Library, CallingConvention = C)]
        internal static extern long odtpack_session_skipped_steps(SessionHandle session);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_last_not_finite(
            SessionHandle session, out byte found, out NativeText code, out long step,
            out NativeText parameters);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_set_learning_rate(
            SessionHandle session, float rate);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_get_learning_rate(
            SessionHandle session, out float rate);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_set_schedule(
            SessionHandle session, ref NativeSchedule schedule, double initialRate);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_proposed_schedule(
            SessionHandle session, long totalSteps, out byte found, out NativeSchedule schedule,
            out double rate);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_restore_schedule(
            SessionHandle session, out byte found);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_scheduler_step(SessionHandle session);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_to_buffer(
            SessionHandle session, [MarshalAs(Byte)] bool onlyTrainable, out IntPtr buffer);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_from_buffer(
            SessionHandle session, ValueHandle buffer, [MarshalAs(Byte)] bool onlyTrainable);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_export(
            SessionHandle session, byte[] path, IntPtr[] outputs, UIntPtr count);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_session_predictor(
            SessionHandle session, IntPtr[] outputs, UIntPtr count, out PredictorHandle predictor);

        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_generator_create(
            IntPtr env, OptionsHandle options, int threads, PackageHandle package,
            out GeneratorHandle generator);
        [DllImport(Library, CallingConvention = C)]
        internal static extern void odtpack_generator_release(IntPtr generator);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_generator_add_adapter(
            GeneratorHandle generator, byte[] name, byte[] path);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_generator_add_state(
            GeneratorHandle generator, byte[] name, StateHandle state);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_generator_remove_adapter(
            GeneratorHandle generator, byte[] name);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_generator_logits(
            GeneratorHandle generator, long[] tokens, UIntPtr count, byte[] adapter,
            out IntPtr logits);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_tokens_begin(
            GeneratorHandle generator, long[] prompt, UIntPtr count,
            ref NativeGenerateOptions options, out TokensHandle tokens);
        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_tokens_next(
            TokensHandle tokens, out byte found, out long token);
        [DllImport(Library, CallingConvention = C)]
        internal static extern void odtpack_tokens_release(IntPtr tokens);

        [DllImport(Library, CallingConvention = C)]
        internal static extern IntPtr odtpack_benchmark(
            IntPtr env, byte[] kit, byte[] folder, int threads, ulong memoryLimit, ulong fileBytes,
            double loadMinutes, out NativeText json);
    }

    /// <summary>Strings as C takes a list of them, as long as it is not disposed of.</summary>
    internal struct Names : IDisposable {
        internal readonly IntPtr[] Pointers;
        readonly GCHandle[] pins;
        internal UIntPtr Count => (UIntPtr)pins.Length;

        internal Names(IReadOnlyCollection<string> names) {
            if (names == null) throw new ArgumentNullException(nameof(names));
            var texts = new List<byte[]>();
            foreach (var name in names) texts.Add(Native.Encode(name));
            pins = texts.ConvertAll(each => GCHandle.Alloc(each, GCHandleType.Pinned)).ToArray();
            Pointers = new IntPtr[pins.Length + 1]; // an empty list is a list, and not null
            for (var i = 0; i < pins.Length; ++i) Pointers[i] = pins[i].AddrOfPinnedObject();
        }
        public void Dispose() {
            foreach (var pin in pins) pin.Free();
        }
    }
}
