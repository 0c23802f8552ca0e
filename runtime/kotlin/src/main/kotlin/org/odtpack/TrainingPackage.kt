package org.odtpack

import ai.onnxruntime.OrtException
import ai.onnxruntime.OrtSession.SessionOptions
import java.io.*
import java.nio.ByteBuffer
import java.nio.channels.Channels
import java.security.*
import java.security.spec.*
import kotlin.io.encoding.*

/** Tells whether a signature, 64 bytes of Ed25519, is that of the manifest's bytes. */
fun interface SignatureCheck {
    fun verify(manifest: ByteArray, signature: ByteArray): Boolean
}

/**
 * Checks with the platform's Ed25519: Java from 15, Android from 13 (API 33).
 *
 * @param publicKey The 32 bytes of the key, or its SubjectPublicKeyInfo as PEM text or DER.
 */
@OptIn(ExperimentalEncodingApi::class) // java.util.Base64 is not on every Android of API 24 and 25
class Ed25519(publicKey: ByteArray) : SignatureCheck {
    private val encoded = String(publicKey, Charsets.ISO_8859_1).let { text ->
        when {
            text.startsWith("-----BEGIN") -> Base64.decode(text.lines().filter { '-' !in it }.joinToString("").trim())
            publicKey.size == 32 -> PREFIX + publicKey
            else -> publicKey
        }
    }

    override fun verify(manifest: ByteArray, signature: ByteArray) = try {
        val key = KeyFactory.getInstance("Ed25519").generatePublic(X509EncodedKeySpec(encoded))
        Signature.getInstance("Ed25519").run {
            initVerify(key)
            update(manifest)
            verify(signature)
        }
    } catch (_: NoSuchAlgorithmException) {
        fail("signature-unsupported",
            "This platform has no Ed25519, which Android has from 13 (API 33) and Java from 15.",
            "pass a SignatureCheck that calls the app's own library")
    } catch (_: InvalidKeySpecException) {
        fail("signature-wrong", "The public key is not one of Ed25519.")
    } catch (_: SignatureException) {
        false
    }

    private companion object {
        /** SubjectPublicKeyInfo of Ed25519 up to the key (RFC 8410). */
        val PREFIX = byteArrayOf(48, 42, 48, 5, 6, 3, 43, 101, 112, 3, 33, 0)
    }
}

/** Opens a file of a package that is not in a folder, such as `context.assets::open`. */
fun interface Assets {
    @Throws(IOException::class)
    fun open(path: String): InputStream
}

/** A package: a folder whose files are those that its manifest describes. */
class TrainingPackage private constructor(val folder: String, internal val manifest: Manifest) {
    internal val inputs get() = manifest.inputs
    internal val outputs get() = manifest.outputs
    internal val evaluationOutputs get() = manifest.evaluationOutputs
    internal val parameters get() = manifest.parameters
    internal val trainable = manifest.trainable
    internal val extra get() = manifest["files"]["extra"].list(emptyList())

    /** The path of a file by its key in the manifest: `training_model`, `checkpoint` and so on. */
    @Throws(OrtException::class)
    fun path(key: String): String {
        val file = manifest["files"][key].given.takeIf { key in FILES }
            ?: fail("package-incomplete", "The package has no $key.", where = folder)
        return "$folder/${file["path"].text()}"
    }

    /** Whether it is trained segment by segment. */
    internal val hasSegments get() = !manifest["segments"].absent

    /** Batches per optimizer step. */
    internal val accumulationSteps get() = manifest["accumulation_steps"].whole(1)

    /**
     * The path of the model that trains and updates at once, of a package that has one and makes
     * its steps of one batch.
     */
    internal val stepModel: String?
        get() {
            val none = manifest["files"]["step_model"].absent || hasSegments || accumulationSteps != 1L
            return if (none) null else path("step_model")
        }

    /** The path of a model in ORT format. */
    @JvmOverloads @Throws(OrtException::class)
    fun ortModel(of: String, style: String = "fixed", platform: String = ""): String {
        val found = extra.find {
            it["role"].text() == "ort_model" && it["of"].text("") == of && it["style"].text("") == style &&
                it["platform"].text("") == platform
        } ?: fail("no-ort-model", "The package holds no such $of in ORT format.", "odtpack ort $folder --style $style",
            folder)
        return "$folder/${found["path"].text()}"
    }

    /** The path of the model that generates. */
    internal val decoder: String
        get() {
            val found = extra.find { it["role"].text() == "decoder_model" }
                ?: fail("no-decoder", "The package has no model for generation.", "build it with --segments and " +
                    "--adapter lora, of a decoder that was exported with its key-value cache", folder)
            return "$folder/${found["path"].text()}"
        }

    /**
     * The path of a library of native kernels, which sessions of the package take from then on; none
     * by default. It needs ONNX Runtime 1.17; `ODTPACK_NATIVE=0` in the environment turns it off.
     */
    var kernels: String? = null
        set(path) {
            // ONNX Runtime unloads it when the options are closed, which sessions outlive.
            try {
                path?.let { System.load(File(it).absolutePath) }
            } catch (error: UnsatisfiedLinkError) {
                fail("no-native-kernels", "The library cannot be loaded: ${error.message}.", where = path!!)
            }
            field = path
        }

    /** The session options that the package asks for; [threads] are at most 256; 0 leaves the choice to it. */
    @JvmOverloads @Throws(OrtException::class)
    fun sessionOptions(threads: Int = 0): SessionOptions {
        if (threads > 256) {
            fail("bad-argument", "A session has at most 256 threads, not $threads.",
                "pass 0, and the package or ONNX Runtime chooses")
        }
        val session = manifest["session"].given ?: Json.read(OLDER)
        val options = SessionOptions()
        options.setOptimizationLevel(LEVELS.getValue(session["optimization_level"].text()))
        options.setMemoryPatternOptimization(session["memory_pattern"].flag(true))
        // An arena for each session of segments would hold the peaks of all of them at once.
        options.setCPUArenaAllocator(session["arena"].flag(true) && !hasSegments)
        if (!session["prepacking"].flag(true)) options.addConfigEntry("session.disable_prepacking", "1")
        options.setIntraOpNumThreads(if (threads > 0) threads else session["threads"].whole(0).toInt())
        if (session["config"].given?.contains(SPINNING) == true) options.addConfigEntry(SPINNING, "1")
        if (System.getenv("ODTPACK_NATIVE") != "0") kernels?.let { addKernels(options, it) }
        return options
    }

    /** A session keeps some kilobytes of each operator of the library: it has as many as the package needs. */
    private fun addKernels(options: SessionOptions, library: String) {
        val models = manifest["operators"].given?.fields().orEmpty().values
        val names = models.flatMap { it.given?.get("odtpack.native")?.given?.fields()?.keys.orEmpty() }
        val counts = listOf("Kernel", "Codes", "SignedCodes").map { kind ->
            val numbered = Regex("$kind(\\d{1,4})")
            names.mapNotNull { numbered.matchEntire(it)?.run { groupValues[1].toInt() + 1 } }.maxOrNull() ?: 0
        }
        options.addConfigEntry("odtpack.native.operators", counts.joinToString(" "))
        options.registerCustomOpLibrary(library)
    }

    private fun checkFile(root: File, entry: Json) {
        val name = entry["path"].text()
        val refuse = { code: String, problem: String ->
            fail(code, "The package's file '$name' $problem.",
                "copy the whole folder again, or build the package again", folder)
        }
        val file = File(folder, name)
        try {
            if (file.canonicalFile != File(root, name)) refuse("package-path", "does not lie inside the package")
            if (!file.isFile) refuse("package-incomplete", "is missing")
            val same = file.length() == entry["size_bytes"].whole() && hex(sha256(file)) == entry["sha256"].text()
            if (!same) refuse("package-changed", "is not the one that the manifest describes")
        } catch (error: IOException) {
            refuse("package-incomplete", "cannot be read: ${error.message}")
        }
    }

    companion object {
        private const val MOST_BYTES = 4 shl 20 // of a manifest

        /** What packages without session options were built for. */
        private val OLDER = """{"optimization_level": "extended", "memory_pattern": false,
            "config": {"session.force_spinning_stop": "1"}}""".toByteArray()

        /**
         * Open a folder and check its files' paths, sizes and hashes, and the signature if asked
         * to.
         */
        @JvmStatic @JvmOverloads @Throws(OrtException::class)
        fun open(folder: String, signature: SignatureCheck? = null): TrainingPackage {
            if (folder.isEmpty()) return open(".", signature)
            val bytes = content(File(folder, MANIFEST), "package-not-found")
            if (signature != null) {
                val mark = content(File(folder, SIGNATURE), "not-signed")
                if (mark.size != 64 || !signature.verify(bytes, mark)) {
                    fail("signature-wrong", "The manifest was not signed with this key.", where = folder)
                }
            }
            return TrainingPackage(folder, readManifest(bytes, folder)).apply {
                val root = File(folder).canonicalFile
                for (file in manifest.files) checkFile(root, file)
            }
        }

        /** A manifest, of which all that a kit reads was checked. */
        internal fun readManifest(bytes: ByteArray, folder: String): Manifest {
            val json = Json.read(bytes)
            if (json["schema_version"].whole() != 1L) {
                fail("manifest-version", "The manifest has another schema version than 1.", "update the app", folder)
            }
            if (!json["target"].absent) {
                fail("package-target", "The package was built for onnxruntime-training.",
                    "odtpack build without --target ort-training", folder)
            }
            if (!json["privacy"].absent) {
                fail("private-training", "The package is trained with private gradients, which this kit does not make.",
                    "train it with Python, or build it without privacy", folder)
            }
            return Manifest(json)
        }

        /**
         * Copy a package from an app's assets to a folder, where ONNX Runtime maps its files, and
         * open it. What is already there, whole and the same, is not copied again.
         *
         * @param assets `TrainingPackage.unpack(folder, { context.assets.open("package/$it") })`
         */
        @JvmStatic @JvmOverloads @Throws(OrtException::class)
        fun unpack(folder: String, assets: Assets, signature: SignatureCheck? = null): TrainingPackage {
            if (folder.isEmpty()) return unpack(".", assets, signature)
            val bytes = try {
                assets.open(MANIFEST).use(::start)
            } catch (error: IOException) {
                fail("package-not-found", "The assets have no $MANIFEST: ${error.message}.")
            }
            val target = File(folder, MANIFEST)
            try {
                if (target.isFile && target.readBytes().contentEquals(bytes)) return open(folder, signature)
            } catch (_: OdtpackException) { // what is there was damaged: it is copied again
            }
            try {
                copy(assets, File(folder), bytes, signature != null)
            } catch (error: IOException) {
                notWritten(target, error)
            }
            return open(folder, signature)
        }

        /**
         * The manifest comes last. A file takes the place of another of its name, which a session
         * may have mapped: it is not written into.
         */
        private fun copy(assets: Assets, folder: File, manifest: ByteArray, signed: Boolean) {
            val files = listedFiles(Json.read(manifest)).map { it["path"].text() }
            val names = if (signed) files + SIGNATURE else files
            for (name in names) { // before anything is changed
                try {
                    assets.open(name).close()
                } catch (error: IOException) {
                    fail("package-incomplete", "The assets have no $name: ${error.message}.")
                }
            }
            folder.mkdirs()
            File(folder, MANIFEST).delete() // a folder with files of two packages is none
            for (name in names) {
                val file = File(folder, name)
                file.parentFile!!.mkdirs()
                writeAtomically(file) { to -> assets.open(name).use { it.copyTo(Channels.newOutputStream(to)) } }
            }
            writeAtomically(File(folder, MANIFEST)) { it.writeAll(ByteBuffer.wrap(manifest)) }
        }

        /** A stream up to one byte more than a manifest may have. */
        private fun start(stream: InputStream): ByteArray {
            val bytes = ByteArray(MOST_BYTES + 1)
            var size = 0
            while (size < bytes.size) {
                val got = stream.read(bytes, size, bytes.size - size)
                if (got < 0) break
                size += got
            }
            if (size > MOST_BYTES) Json.invalid("it has more than 4 MiB")
            return bytes.copyOf(size)
        }

        private fun content(file: File, missing: String): ByteArray {
            try {
                if (isLink(file)) fail("package-path", "${file.path} is a link.")
                if (file.isFile) return file.inputStream().use(::start)
            } catch (error: IOException) {
                fail(missing, "${file.path} cannot be read: ${error.message}.")
            }
            fail(missing, "There is no ${file.path}.", "copy the whole folder of the package")
        }
    }
}
