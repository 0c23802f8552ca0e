// Tensors: managed arrays, or memory of ONNX Runtime, as ONNX Runtime sees them.
using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;

namespace Odtpack {
    /// <summary>The types of elements, with the numbers of ONNX.</summary>
    public enum TensorElementType {
        Float = 1, UInt8 = 2, Int8 = 3, UInt16 = 4, Int16 = 5, Int32 = 6, Int64 = 7, Bool = 9,
        Float16 = 10, Double = 11, UInt32 = 12, UInt64 = 13
    }

    /// <summary>A value and what its memory belongs to, which goes after it.</summary>
    internal sealed class ValueHandle : Handle {
        readonly GCHandle pin;
        readonly IntPtr memory;

        internal ValueHandle(IntPtr value, GCHandle pin, IntPtr memory) {
            this.pin = pin;
            this.memory = memory;
            SetHandle(value);
        }
        protected override void Free(IntPtr it) {
            Ort.Api.ReleaseValue(it);
            if (memory != IntPtr.Zero) Native.odtpack_memory_release(memory);
            if (pin.IsAllocated) pin.Free();
        }
    }

    /// <summary>An array in row-major order. Dispose of it: what it pins or owns is freed
    /// then.</summary>
    public sealed unsafe class OrtValue : IDisposable {
        internal readonly ValueHandle Handle;
        readonly long[] shape;
        readonly byte* data;

        public TensorElementType ElementType { get; }
        public IReadOnlyList<long> Shape => shape;
        public long Count { get; }
        internal bool IsReal => ElementType == TensorElementType.Float
            || ElementType == TensorElementType.Double || ElementType == TensorElementType.Float16;

        /// <summary>A view of an array, which stays where it is until the value is disposed of:
        /// nothing is copied, and what is written into the array counts in the next step.</summary>
        public static OrtValue CreateTensorValueFromMemory<T>(T[] memory, params long[] shape)
            where T : struct => CreateTensorValueFromPart(memory, 0, shape);
        /// <summary>A view of a part of an array, from an element on: a batch of all samples, for
        /// example.</summary>
        public static OrtValue CreateTensorValueFromPart<T>(
            T[] memory, int first, params long[] shape) where T : struct =>
            CreateTensorValueFromPart(memory, first, TypeOf(typeof(T)), shape);
        /// <summary>With elements that have no type of their own in C#: ushort for Float16, byte
        /// for Bool.</summary>
        public static OrtValue CreateTensorValueFromPart<T>(
            T[] memory, int first, TensorElementType type, params long[] shape)
            where T : struct {
            if (memory == null) throw new ArgumentNullException(nameof(memory));
            if (shape == null) throw new ArgumentNullException(nameof(shape));
            RequireType(typeof(T), type);
            var count = CountOf(shape);
            if (first < 0 || count > memory.Length - first)
                throw new OdtpackException(
                    "buffer-size", $"An array of {memory.Length} elements has no tensor of shape "
                    + $"[{string.Join(", ", shape)}] from {first} on.");
            var (ort, size) = (Ort.Api, SizeOf(type));
            var pin = GCHandle.Alloc(memory, GCHandleType.Pinned);
            var value = IntPtr.Zero;
            try {
                var start = new IntPtr(pin.AddrOfPinnedObject().ToInt64() + (long)first * size);
                ort.Check(ort.CreateTensorWithDataAsOrtValue(
                    ort.Cpu, start, (UIntPtr)(count * size), shape, (UIntPtr)shape.Length, type,
                    out value));
            } finally {
                if (value == IntPtr.Zero) pin.Free();
            }
            return new OrtValue(value, pin);
        }

        /// <summary>What ONNX Runtime made; the value owns it and its memory.</summary>
        internal OrtValue(IntPtr value, GCHandle pin = default(GCHandle),
                          IntPtr memory = default(IntPtr)) {
            Handle = new ValueHandle(value, pin, memory);
            var ort = Ort.Api;
            ort.Check(ort.GetTensorTypeAndShape(value, out var info));
            try {
                ort.Check(ort.GetTensorElementType(info, out var type));
                ort.Check(ort.GetDimensionsCount(info, out var rank));
                shape = new long[(int)rank];
                ort.Check(ort.GetDimensions(info, shape, rank));
                ort.Check(ort.GetTensorMutableData(value, out var start));
                ElementType = type;
                Count = CountOf(shape);
                data = (byte*)start;
            } finally {
                ort.ReleaseInfo(info);
            }
        }
        public void Dispose() => Handle.Dispose();

        /// <summary>A copy of the elements.</summary>
        public T[] ToArray<T>() where T : struct {
            var array = new T[Count];
            CopyTo(array);
            return array;
        }
        /// <summary>Copy all elements into an array that has as many.</summary>
        public void CopyTo<T>(T[] target) where T : struct => Copy(target, false);
        /// <summary>Set all elements from an array that has as many.</summary>
        public void CopyFrom<T>(T[] source) where T : struct => Copy(source, true);
        /// <summary>A scalar of a floating type, such as a loss.</summary>
        public double GetScalar() => GetReal(0);
        /// <summary>An element of a floating type.</summary>
        public double GetReal(long index) {
            if (index < 0 || index >= Count) throw new ArgumentOutOfRangeException(nameof(index));
            using (new Hold(Handle)) {
                switch (ElementType) {
                    case TensorElementType.Float: return ((float*)data)[index];
                    case TensorElementType.Double: return ((double*)data)[index];
                    case TensorElementType.Float16: return FromHalf(((ushort*)data)[index]);
                }
            }
            throw new OdtpackException("buffer-type", $"{ElementType} is not a floating type.");
        }

        void Copy<T>(T[] array, bool into) where T : struct {
            if (array == null) throw new ArgumentNullException(nameof(array));
            RequireType(typeof(T), ElementType);
            if (array.LongLength != Count)
                throw new OdtpackException(
                    "buffer-size", $"The array has {array.LongLength} elements and not {Count}.");
            if (Count == 0) return;
            var pin = GCHandle.Alloc(array, GCHandleType.Pinned);
            try {
                using (new Hold(Handle)) {
                    var other = (byte*)pin.AddrOfPinnedObject();
                    var bytes = Count * SizeOf(ElementType);
                    Buffer.MemoryCopy(into ? other : data, into ? data : other, bytes, bytes);
                }
            } finally {
                pin.Free();
            }
        }

        static readonly Dictionary<Type, TensorElementType> Types =
            new Dictionary<Type, TensorElementType> {
                [typeof(float)] = TensorElementType.Float,
                [typeof(byte)] = TensorElementType.UInt8,
                [typeof(sbyte)] = TensorElementType.Int8,
                [typeof(ushort)] = TensorElementType.UInt16,
                [typeof(short)] = TensorElementType.Int16,
                [typeof(int)] = TensorElementType.Int32,
                [typeof(long)] = TensorElementType.Int64,
                [typeof(double)] = TensorElementType.Double,
                [typeof(uint)] = TensorElementType.UInt32,
                [typeof(ulong)] = TensorElementType.UInt64
            };
        static readonly byte[] Sizes = { 0, 4, 1, 1, 2, 2, 4, 8, 0, 1, 2, 8, 4, 8 };

        static TensorElementType TypeOf(Type type) =>
            Types.TryGetValue(type, out var found) ? found : throw new OdtpackException(
                "buffer-type", $"{type.Name} is not the type of a tensor's elements.", "",
                "hand in bytes for Bool, ushort for Float16");
        internal static int SizeOf(TensorElementType type) => Sizes[(int)type];
        static void RequireType(Type elements, TensorElementType type) {
            var own = TypeOf(elements);
            if (own != type && (own != TensorElementType.UInt8 || type != TensorElementType.Bool)
                && (own != TensorElementType.UInt16 || type != TensorElementType.Float16))
                throw new OdtpackException(
                    "buffer-type", $"An array of {elements.Name} does not hold {type}.");
        }
        static long CountOf(long[] shape) {
            long count = 1;
            foreach (var size in shape) {
                if (size < 0 || count > long.MaxValue / Math.Max(size, 1))
                    throw new OdtpackException(
                        "buffer-size", "A size is negative, or all together are too large.");
                count *= size;
            }
            return count;
        }
        static double FromHalf(ushort bits) {
            int exponent = bits >> 10 & 31, fraction = bits & 1023;
            var size = exponent == 31 ? (fraction == 0 ? double.PositiveInfinity : double.NaN)
                : exponent == 0 ? fraction * Math.Pow(2, -24)
                : (1024 + fraction) * Math.Pow(2, exponent - 25);
            return bits >> 15 == 1 ? -size : size;
        }
    }

    /// <summary>Keeps a handle from being freed.</summary>
    internal struct Hold : IDisposable {
        readonly SafeHandle handle;
        readonly bool isHeld;

        internal Hold(SafeHandle handle) {
            this.handle = handle;
            isHeld = false;
            handle.DangerousAddRef(ref isHeld);
        }
        public void Dispose() {
            if (isHeld) handle.DangerousRelease();
        }
    }
}
