package org.odtpack

import ai.onnxruntime.*
import ai.onnxruntime.OrtSession.*
import java.io.File
import java.nio.ByteBuffer
import kotlin.math.exp

private const val PAST = "past_key_values."
private const val PRESENT = "present."
private const val AT_ONCE = 32 // tokens of a prompt: the logits of each are as many as the words

/**
 * The inference model of a decoder that was trained in segments, loaded once. Any number of adapters
 * may be beside it, and each call says which one counts. One call at a time, those of its tokens
 * included: another thread's is `busy`. Needs an ONNX Runtime for Java with `OrtLoraAdapter`, such as
 * 1.29.
 *
 * @throws OdtpackException `no-decoder` if the package has none.
 */
class Generator @JvmOverloads @Throws(OrtException::class) constructor(
    private val env: OrtEnvironment,
    private val pack: TrainingPackage,
    threads: Int = 0,
    options: SessionOptions? = null,
) : AutoCloseable {
    private val turn = Turn()
    private val adapters = HashMap<String, () -> ByteArray>()
    private var opened: OrtSession?
    private val session get() = opened ?: fail("closed", "The generator is closed.", "make a new one")

    init {
        Telemetry.stop(env)
        opened = pack.sessionOptions(threads).use { own ->
            // An adapter's inputs have values, which is meant.
            own.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR)
            openDecoder(env, pack, options ?: own)
        }
    }

    /** Put an adapter beside the decoder: a file or folder that `saveAdapter` or PEFT wrote. */
    @Throws(OrtException::class)
    fun addAdapter(name: String, path: String) {
        val shapes = pack.trainable.associate { it.name to Tensor(it.type, it.shape, ByteBuffer.allocate(0)) }
        val values = bytesOf(adapterValues(pack, shapes, File(path)))
        turn.take { adapters[name] = { values } }
    }

    /** The same of a state, as it is when each later call begins; it must be one of the package. */
    @Throws(OrtException::class)
    fun addAdapter(name: String, checkpoint: OrtCheckpointState) = turn.take {
        checkpoint.own { trainedOf(pack, checkpoint.state) }
        adapters[name] = { checkpoint.own { bytesOf(trainedOf(pack, checkpoint.state)) } }
    }

    /** Forget an adapter, if it is there; tokens that are being made keep it. */
    @Throws(OrtException::class)
    fun removeAdapter(name: String) = turn.take { adapters -= name }

    /** The logits of the token after a sequence; without an adapter, of the exported decoder. */
    @JvmOverloads @Throws(OrtException::class)
    fun logits(tokens: IntArray, adapter: String? = null): FloatArray =
        turn.take { Reading(tokens, adapter).use { it.read(tokens) } }

    /**
     * The tokens that follow a prompt, each as soon as it is asked for. Close them, unless all were
     * taken; they end with an error.
     *
     * @param maxTokens How many follow at most.
     * @param stop Tokens that end the sequence, and are not in it.
     * @param temperature 0 for the likeliest token each time; otherwise one is drawn of the softmax
     *   of the logits divided by it.
     * @param topK One of that many likeliest tokens is drawn; 0 for all.
     * @param topP Of the likeliest that have this probability together.
     * @param seed The same one draws the same tokens, as in Python.
     */
    @JvmOverloads @Throws(OrtException::class)
    fun generate(
        prompt: IntArray,
        adapter: String? = null,
        maxTokens: Int = 256,
        stop: Set<Int> = emptySet(),
        temperature: Double = 0.0,
        topK: Int = 0,
        topP: Double = 1.0,
        seed: Long = 0,
    ): Tokens {
        if (!(temperature >= 0 && topK >= 0 && topP > 0 && topP <= 1 && maxTokens >= 0)) {
            fail("bad-argument", "temperature, topK and maxTokens must be 0 or more, topP above 0 and at most 1.")
        }
        val draw = Draw(temperature, topK, topP, seed)
        return turn.take { Tokens(turn, Reading(prompt, adapter), prompt, maxTokens, stop, draw) }
    }

    /**
     * Free the decoder, once the call that runs has ended. Every later one is `closed`; closing again
     * does nothing. Close the tokens that are being made before.
     */
    override fun close() = turn.await {
        opened?.close()
        opened = null
    }

    /** The adapter alone, of what was trained, as ONNX Runtime reads it. */
    private fun bytesOf(trained: Map<String, Tensor>): ByteArray {
        val names = pack.manifest["adapter"]["parameters"].texts().toSet()
        return onnxAdapter(trained.filterKeys(names::contains)).toBytes()
    }

    /** What the decoder has read of one sequence. */
    internal inner class Reading(prompt: IntArray, adapter: String?) : AutoCloseable {
        private val own = ArrayList<AutoCloseable>()
        private val options: RunOptions
        private val inputs = HashMap<String, OnnxTensor>()
        private var last: OrtSession.Result? = null // has the cache
        var count = 0
            private set

        init {
            if (prompt.isEmpty() || prompt.any { it < 0 }) {
                fail("bad-prompt", "A prompt is a sequence of one token or more, as whole numbers from 0 on.")
            }
            // Some kernels take a token beyond the vocabulary for a vector of zeros.
            val words = pack.inputs.maxOf { it.classCount } // 0 where it is not known
            if (words > 0 && prompt.max() >= words) {
                fail("bad-prompt", "The token ${prompt.max()} is not below the $words of the vocabulary.")
            }
            val past = session.inputInfo.filterKeys { it.startsWith(PAST) }
            val bytes = adapter?.let { name ->
                val known = adapters[name]
                    ?: fail("unknown-adapter", "There is no adapter '$name'.", "add it first: addAdapter(name, path)")
                known()
            }
            options = RunOptions().also(own::add) // not before: what is refused leaves nothing to close
            if (bytes != null) options.addActiveLoraAdapter(OrtLoraAdapter.create(bytes).also(own::add))
            for ((name, node) in past) {
                val info = node.info as TensorInfo
                val shape = longArrayOf(1, info.shape[1], 0, info.shape[3])
                inputs[name] = zeros(Type.of(info.onnxType)!!, shape).onnx(env).also(own::add)
            }
        }

        /** Read further tokens, some at a time; the logits of the last. */
        fun read(tokens: IntArray): FloatArray {
            var logits = FloatArray(0)
            for (start in tokens.indices step AT_ONCE) {
                logits = part(tokens.copyOfRange(start, minOf(start + AT_ONCE, tokens.size)))
            }
            return logits
        }

        private fun part(tokens: IntArray): FloatArray {
            val end = count + tokens.size
            val given = mapOf(
                "input_ids" to tokens.asList(), "attention_mask" to List(end) { 1 },
                "position_ids" to (count until end).toList(),
            ).filterKeys(session.inputNames::contains).mapValues { (_, values) ->
                val tensor = zeros(Type.INT64, longArrayOf(1, values.size.toLong()))
                values.forEachIndexed { i, each -> tensor[i] = each.toDouble() }
                tensor.onnx(env)
            }
            val result = try {
                session.runOn(inputs + given, session.outputNames, emptyMap(), options,
                    "pass fewer tokens, of those that the decoder knows")
            } finally {
                given.values.forEach(OnnxTensor::close)
            }
            last?.close()
            last = result
            for (name in inputs.keys) inputs[name] = result.get(PRESENT + name.removePrefix(PAST)).get() as OnnxTensor
            count = end
            // Of float16 as well.
            val logits = (result.get("logits").get() as OnnxTensor).floatBuffer
            val words = logits.remaining() / tokens.size
            logits.position(logits.limit() - words)
            return FloatArray(words).also(logits::get)
        }

        override fun close() {
            own.forEach(AutoCloseable::close)
            own.clear()
            last?.close()
            last = null
        }
    }
}

/** Tokens as they are made: `generator.generate(prompt).use { for (token in it) … }`. */
class Tokens internal constructor(
    private val turn: Turn,
    private val reading: Generator.Reading,
    private var unread: IntArray,
    private var left: Int,
    private val stop: Set<Int>,
    private val draw: Draw,
) : Iterator<Int>, AutoCloseable {
    private var token: Int? = null

    override fun hasNext(): Boolean = turn.take {
        if (token == null && left > 0) {
            val all = left
            left = 0 // also where it fails
            val logits = reading.read(unread)
            if (!logits.max().isFinite()) {
                fail("run-failed", "The decoder's logits after ${reading.count} tokens are not finite.",
                    "use an adapter from before its training diverged")
            }
            token = draw(logits).takeUnless(stop::contains)?.also {
                unread = intArrayOf(it)
                left = all - 1
            }
        }
        token != null
    }.also { if (!it) close() }

    override fun next(): Int {
        if (!hasNext()) throw NoSuchElementException()
        return token!!.also { token = null }
    }

    override fun close() {
        left = 0
        turn.await(reading::close)
    }
}

/** Chooses a token by its logits; kits that are given the same seed draw the same. */
internal class Draw(
    private val temperature: Double,
    private val topK: Int,
    private val topP: Double,
    private var state: Long,
) {
    operator fun invoke(logits: FloatArray): Int {
        if (temperature == 0.0) return logits.indices.maxByOrNull { logits[it] + 0f }!!
        val sorted = logits.indices.sortedByDescending { logits[it] + 0f } // no negative zeros
        val order = if (topK > 0) sorted.take(topK) else sorted
        val highest = logits[order[0]].toDouble()
        var sum = 0.0
        val totals = order.map { sum += exp((logits[it] - highest) / temperature); sum }
        val last = totals.indexOfFirst { it >= topP * sum }
        val kept = totals.subList(0, last + 1)
        val place = uniform() * kept.last()
        return order[kept.indexOfFirst { it > place }.let { if (it < 0) kept.lastIndex else it }]
    }

    /** The next number of SplitMix64, from 0 to below 1. */
    private fun uniform(): Double {
        state -= 0x61C8864680B583EB
        var mixed = (state xor (state ushr 30)) * -0x40A7B892E31B1A47
        mixed = (mixed xor (mixed ushr 27)) * -0x6B2FB644ECCEEE15
        return ((mixed xor (mixed ushr 31)) ushr 11) / 9007199254740992.0
    }
}
