package org.odtpack

import java.io.*
import java.nio.*
import java.nio.channels.*
import java.nio.file.*
import java.nio.file.attribute.*
import java.util.UUID
import java.util.concurrent.*

/** The bytes of a file, as pages of the file's own: they take no memory of the process. */
internal fun map(file: File): ByteBuffer = uninterrupted {
    // A pipe would block.
    if (file.exists() && !file.isFile) throw IOException("${file.path} is not a file")
    RandomAccessFile(file, "r").use { opened ->
        val size = opened.length()
        if (size > Int.MAX_VALUE) throw IOException("${file.path} has $size bytes")
        opened.channel.map(FileChannel.MapMode.READ_ONLY, 0, size).order(ByteOrder.LITTLE_ENDIAN)
    }
}

/**
 * Run [body], and once more if an interrupt closed its files, on a thread that nobody interrupts. The
 * interrupt is set again at the end.
 */
internal fun <T> uninterrupted(body: () -> T): T {
    var interrupted = Thread.interrupted()
    try {
        try {
            return body()
        } catch (error: Exception) {
            if (error !is InterruptedException && !Thread.currentThread().isInterrupted) throw error
            interrupted = true
        }
        val again = FutureTask(body)
        Thread(again).start()
        while (true) {
            try {
                return again.get()
            } catch (_: InterruptedException) { // it goes on
            }
        }
    } catch (error: ExecutionException) {
        throw error.cause!!
    } finally {
        if (interrupted) Thread.currentThread().interrupt()
    }
}

/** Write the bytes of a buffer, whose position stays: they may be written again. */
internal fun FileChannel.writeAll(bytes: ByteBuffer) {
    val rest = bytes.duplicate()
    while (rest.hasRemaining()) write(rest)
}

/** A link leads elsewhere, and so does a path with `..` in it. */
internal fun isLink(file: File): Boolean {
    val folder = file.absoluteFile.parentFile ?: return false // of the root
    val own = File(folder.canonicalFile, file.name)
    return own.canonicalFile != own.absoluteFile
}

/** Refuse to save to a link: it would be replaced, and what it leads to stay as it is. */
internal fun refuseLink(target: File) {
    // A link that leads nowhere has no path but its own: only the system tells, from Android 26.
    val linked = runCatching { Files.isSymbolicLink(target.toPath()) }
        .getOrElse { runCatching { isLink(target) }.getOrDefault(false) }
    if (target.isDirectory || !linked) return
    fail("file-not-written", "${target.path} is a link, and nothing is saved through a link or in its place.",
        "remove the link, or name the file that it leads to")
}

/**
 * Give a new file the permissions of the one that it replaces or belongs to; its owner may read and
 * write one that [isOpenedAgain].
 */
internal fun takeMode(file: File, of: File, isOpenedAgain: Boolean = false) {
    runCatching { // there is none, or Windows, or Android before 26, which lacks the classes
        val taken = Files.getPosixFilePermissions(of.toPath()).filterNot { "EXECUTE" in it.name }
        val more = if (isOpenedAgain) PosixFilePermissions.fromString("rw-------") else setOf()
        Files.setPosixFilePermissions(file.toPath(), taken.toSet() + more)
    }
}

/** Which file a name stands for, of what size and time; null if nothing tells. */
internal fun identity(file: File): Any? = runCatching { // Android before 26 has no such classes
    Files.readAttributes(file.toPath(), BasicFileAttributes::class.java).run {
        fileKey()?.let { listOf(it, size(), lastModifiedTime().to(TimeUnit.NANOSECONDS)) }
    }
}.getOrNull()

/**
 * Write a file whole or not at all: temporary, force, rename. The file that is replaced is kept
 * as [previous], if that is given; what is not an ordinary file is not replaced. Returns the
 * identity of the new file.
 */
internal fun writeAtomically(target: File, previous: File? = null, body: (FileChannel) -> Unit): Any? {
    if (target.isDirectory || target.path.isEmpty()) {
        fail("path-is-a-folder", "'${target.path}' is a folder and not a file.")
    }
    refuseLink(target)
    val folder = target.absoluteFile.parentFile!!
    removeStale(folder, ".${target.name}.")
    val temporary = temporaryFor(target)
    val written = try {
        if (target.exists() && !target.isFile) throw IOException("it is not an ordinary file, which could be replaced")
        uninterrupted {
            RandomAccessFile(temporary, "rw").use {
                takeMode(temporary, target)
                body(it.channel)
                it.channel.force(true)
            }
        }
        val moved = previous?.takeIf { target.exists() && keep(target, it) }
        val made = identity(temporary)
        undoing({ if (!target.exists()) moved?.let { rename(it, target) } }) { rename(temporary, target) }
        made
    } catch (error: IOException) {
        notWritten(target, error)
    } finally {
        temporary.delete()
    }
    try {
        forceFolder(folder)
    } catch (error: IOException) {
        throw NotDurable(target, error)
    }
    return written
}

/** The new file has its name, and its folder could not be synced. */
internal class NotDurable(file: File, error: IOException) : OdtpackException(
    "file-not-written",
    "${file.path} was written, but it may not survive a power cut: ${error.message}.",
)

internal fun notWritten(file: File, error: IOException): Nothing =
    fail("file-not-written", "${file.path} could not be written: ${error.message}.",
        "check that the folder exists, is writable and has space left")

/** A name for what will take that of [target], or was given one more. */
internal fun temporaryFor(target: File): File {
    val random = UUID.randomUUID().toString().takeLast(12)
    return File(target.absoluteFile.parentFile, ".${target.name}.${ownProcess()}-$random.tmp")
}

/**
 * Give a file a second name, so that one of the two always exists. Returns whether it lost its own,
 * because the file system has no hard links.
 */
private fun keep(target: File, previous: File): Boolean = try {
    addName(target, previous, temporaryFor(target))
    false
} catch (_: NoLinks) {
    rename(target, previous)
    true
}

/** Give a file one more name, whether that stands for a file or not; [between] is one on the way. */
internal fun addName(file: File, name: File, between: File) = try {
    link(file, between)
    rename(between, name)
} finally {
    between.delete() // two names of one file: the rename did nothing
}

/** The file system, or the platform, has no hard links: FAT, exFAT, and Android before 26. */
internal class NoLinks : IOException("there are no hard links here")

private val HOW_LINKS_ARE_REFUSED = setOf(
    "Operation not permitted", "Operation not supported", "Function not implemented",
    "Invalid argument", "Too many links",
)

internal fun link(from: File, to: File) {
    try {
        Files.createLink(to.toPath(), from.toPath())
    } catch (error: Throwable) {
        val refused = error is LinkageError || error is UnsupportedOperationException ||
            error is AccessDeniedException || error is FileSystemException && error.reason in HOW_LINKS_ARE_REFUSED
        throw if (refused) NoLinks() else error
    }
}

/** Whether two paths are names of one file. */
internal fun isSame(one: File, other: File) =
    runCatching { Files.isSameFile(one.toPath(), other.toPath()) }.getOrDefault(false)

internal fun rename(from: File, to: File) {
    if (from.renameTo(to)) return // rename(2), which is all that Android has before 26
    try {
        Files.move(from.toPath(), to.toPath(), StandardCopyOption.ATOMIC_MOVE)
    } catch (_: LinkageError) {
        throw IOException("it could not be renamed")
    }
}

/** Make a rename durable, where the platform lets a folder be opened and synced. */
internal fun forceFolder(folder: File) {
    if (File.separatorChar == '\\') return
    try {
        uninterrupted { FileChannel.open(folder.toPath(), StandardOpenOption.READ).use { it.force(true) } }
    } catch (_: LinkageError) { // Android before 26
    } catch (error: IOException) { // a file system that syncs no folders
        if (error.message !in setOf("Invalid argument", "Operation not supported")) throw error
    }
}

/** Held while a data file is locked, or one is closed: locks are those of a process. */
internal object DataFiles

/** Lock a file for this process until it is closed, on file systems that have locks. */
internal fun lock(file: FileChannel) {
    try {
        file.lock()
    } catch (error: IOException) {
        if (error is FileLockInterruptionException || error is ClosedChannelException) throw error
    }
}

/** The number of this process, from Linux, which Android is; 0 elsewhere. */
private fun ownProcess() = File("/proc/self").canonicalFile.name.toIntOrNull() ?: 0

/** Remove temporary files that processes which no longer run left. */
private fun removeStale(folder: File, start: String) {
    if (ownProcess() == 0) return
    for (name in folder.list().orEmpty()) {
        val process = TEMPORARY.matchEntire(name.removePrefix(start))?.groupValues?.get(1)
        val stale = process != null && name.startsWith(start) && !File("/proc/$process").exists()
        if (stale) File(folder, name).delete()
    }
}

private val TEMPORARY = Regex("([1-9][0-9]{0,8})-[0-9a-f]{12}\\.tmp")
