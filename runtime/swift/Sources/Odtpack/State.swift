// What a checkpoint holds, read and written (docs/formats/checkpoint.md).
import Foundation

/// A value that the user attaches to a state: saved with it.
public enum Property: Equatable {
  case int(Int64), float(Float), string(String)
}

struct Parameter {
  var value: ORTValue
  var trainable: Bool
}

/// What an optimizer carries from step to step, in the order of the file; no kind if unknown.
struct OptimizerState {
  var step = 0
  var rate: Float = 0.001
  var moments: [(name: String, values: [ORTValue])] = []
  var groups: [[String]] = []
  var kind = ""
}

/// Everything that training changes; without values if nominal. The trainable parameters and
/// their gradients are parts of two vectors, once a session placed them.
final class TrainingState {
  var parameters: [String: Parameter] = [:]
  var properties: [String: Property] = [:]
  var optimizer: OptimizerState?
  var isNominal = false
  var isChecked = false  // whether its file carried a digest, which was right
  var recovered: String?  // what is wrong with the file in whose place it was loaded
  var damaged: String?  // and where that is
  var flat: ORTValue?, gradients: ORTValue?

  func requireValues() throws {
    if isNominal {
      throw OdtpackError(
        "nominal-state", "The parameters of a nominal checkpoint have no values.",
        hint: "load a complete checkpoint, or all parameters with fromBuffer")
    }
  }
}

let optimizerProperty = "odtpack.optimizer"  // of a file, not of a state

/// Reads one file. Without `values`, tensors are described and not read.
final class CheckpointReader {
  private let place: String, dataPath: String, readsValues: Bool
  private var data = Data(), inlineLeft = 0, externalLeft = Int.max, isNominal = false
  private(set) var firstExternal = Int.max  // lowest offset in the data file
  private var outline = Outline(nominal: false)
  private var said: [(name: String, digest: String)] = []  // what the file says of its tensors

  private init(place: String, dataPath: String, values: Bool) {
    (self.place, self.dataPath, readsValues) = (place, dataPath, values)
  }

  static func read(_ path: String) throws -> TrainingState {
    do {
      return try CheckpointReader(place: path, dataPath: path + ".data", values: true)
        .read(map(path))
    } catch let error as SystemError {
      throw OdtpackError(
        error.code == ENOENT ? "checkpoint-not-found" : "checkpoint-unreadable",
        "The checkpoint cannot be read: \(systemMessage(error.code)).", place: path)
    }
  }
  /// Read a checkpoint, or the one before it if it is damaged or missing.
  static func readLastGood(_ path: String) throws -> TrainingState {
    do {
      return try read(path)
    } catch let error as OdtpackError {
      let before = previousPath(path)
      guard harmed.contains(error.code), isRegularFile(before), let state = try? read(before)
      else { throw error }
      let step = state.optimizer?.step ?? 0
      let last = describe(path)?.state.optimizer?.step ?? 0
      let lost =
        last > step
        ? "\(last - step) optimizer steps made since are lost" : "what was trained since is lost"
      state.recovered =
        "\(error)\nThe save before it was loaded, \(before), of optimizer step \(step): \(lost)."
      state.damaged = path
      return state
    }
  }
  /// Where the elements of a checkpoint in its data file begin; nil if it has none there.
  static func externalStart(_ path: String) -> Int? {
    guard let start = describe(path)?.firstExternal, start != .max else { return nil }
    return start
  }
  /// What a file says, also where its values are not what was saved; nil if it cannot be read.
  private static func describe(_ path: String) -> (state: TrainingState, firstExternal: Int)? {
    let reader = CheckpointReader(place: path, dataPath: "", values: false)
    guard let content = try? map(path), let state = try? reader.read(content) else { return nil }
    return (state, reader.firstExternal)
  }

  private func read(_ content: Data) throws -> TrainingState {
    do {
      return try content.withUnsafeBytes { bytes in
        let file = try FlatFile(bytes)
        return try read(FlatTable(file, at: file.follow(0)))
      }
    } catch let error as Corrupt {
      throw OdtpackError(
        "checkpoint-corrupt", "It is not a readable checkpoint: \(error.reason).", place: place,
        hint: "copy or download the file again, or fall back to an earlier one")
    }
  }

  private func read(_ root: FlatTable) throws -> TrainingState {
    if try root.scalar(0, Int32(0)) != 2 {
      throw OdtpackError("checkpoint-version", "The checkpoint is not of version 2.", place: place)
    }
    guard let module = try root.table(1) else { throw Corrupt(reason: "it has no module state") }
    let state = TrainingState()
    isNominal = try module.scalar(2, UInt8(0)) != 0
    state.isNominal = isNominal
    outline = Outline(nominal: isNominal)
    inlineLeft = root.file.bytes.count
    if try module.scalar(3, UInt8(0)) != 0 && readsValues {
      try require(!isLink(dataPath) && isRegularFile(dataPath), "it has no data file")
      data = try map(dataPath)
    }
    if readsValues { externalLeft = data.count }
    for trainable in [true, false] {
      for (name, value) in try tensors(module.tables(trainable ? 0 : 1)) {
        try require(state.parameters[name] == nil, "'\(name)' is both trainable and frozen")
        state.parameters[name] = Parameter(value: value, trainable: trainable)
      }
    }
    let groups = try root.tables(2)
    outline.count(groups.count)
    if !groups.isEmpty { state.optimizer = try readOptimizer(groups, state) }
    try readProperties(root.table(3), state)
    if readsValues { state.isChecked = try checkDigest(root.text(4)) }
    return state
  }

  /// Compare with the digests that the file carries; false if it carries none.
  private func checkDigest(_ whole: String) throws -> Bool {
    let isMarked = said.contains { $0.digest.hasPrefix("sha256:") }
    if whole.isEmpty && !isMarked { return false }
    let digests = outline.digests()
    if whole == digests.last { return true }
    let odd = zip(said, digests).filter { isMarked && $0.digest != $1 }.map { "'\($0.0.name)'" }
    let what =
      odd.isEmpty ? "its names, shapes, optimizer state or properties" : odd.joined(separator: ", ")
    throw Corrupt(reason: "what is stored is not what was saved: \(what)")
  }

  private func tensors(_ tables: [FlatTable], of owner: String = "") throws -> [(String, ORTValue)]
  {
    var seen = Set<String>()
    outline.count(tables.count)
    return try tables.map { table in
      let name = try table.text(0)
      try require(!name.isEmpty && seen.insert(name).inserted, "a name is empty or occurs twice")
      let value = try tensor(name, table)
      outline.tensor(name, value)
      if readsValues && !isNominal {
        said.append((owner.isEmpty ? name : "\(name) of \(owner)", try table.text(1)))
      }
      return (name, value)
    }
  }

  private func tensor(_ name: String, _ table: FlatTable) throws -> ORTValue {
    let number = try table.scalar(3, Int32(0))
    guard let type = ElementType(rawValue: Int(number)) else {
      throw OdtpackError(
        "checkpoint-dtype",
        "'\(name)' has elements of ONNX type \(number), which are not supported.", place: place)
    }
    let dims = try table.vector(2, size: 8), stored = try table.vector(4, size: 1)
    let offset = Int(try table.scalar(6, Int64(-1))), isExternal = offset != -1
    try require(try !table.has(5), "'\(name)' holds strings")
    if isNominal {
      try require(
        dims.isEmpty && stored.isEmpty && !isExternal, "it is nominal and has values")
      return try ORTValue(type, [0])
    }
    try require(dims.count <= 32 * 8, "'\(name)' has an impossible shape")
    var shape: [Int] = [], most = 1.0
    for position in stride(from: dims.lowerBound, to: dims.upperBound, by: 8) {
      let size = Int(try table.file.scalar(position, Int64.self))
      most *= max(1, Double(size))  // the product itself would be 0 for a zero beside any size
      try require(size >= 0 && most <= 0x1p48, "'\(name)' has an impossible shape")
      shape.append(size)
    }
    let bytes = shape.reduce(type.size, *)
    try require(stored.count == (isExternal ? 0 : bytes), "the shape of '\(name)' is not its size")
    if isExternal { externalLeft -= bytes } else { inlineLeft -= bytes }
    try require(inlineLeft >= 0 && externalLeft >= 0, "its tensors overlap")
    if isExternal { firstExternal = min(firstExternal, offset) }
    if !readsValues { return try ORTValue(type, [0]) }
    let value = try ORTValue(type, shape)
    if !isExternal {
      if bytes > 0 { value.copy(from: table.file.bytes.baseAddress! + stored.lowerBound) }
    } else {
      try require(
        offset >= 0 && offset <= data.count - bytes, "'\(name)' lies outside of its data file")
      data.withUnsafeBytes { if bytes > 0 { value.copy(from: $0.baseAddress! + offset) } }
    }
    if type == .bool {
      try require(
        value.elements(UInt8.self).allSatisfy { $0 < 2 }, "'\(name)' holds bools beyond 0 and 1")
    }
    return value
  }

  private func readOptimizer(_ groups: [FlatTable], _ state: TrainingState) throws -> OptimizerState
  {
    var found = OptimizerState()
    found.step = Int(try groups[0].scalar(1, Int64(0)))
    found.rate = try groups[0].float(2)
    try require(found.step >= 0 && found.rate.isFinite, "its optimizer's step or rate")
    var seen = Set<String>()
    for (index, group) in groups.enumerated() {
      try require(
        try group.text(0) == "group\(index)" && Int(group.scalar(1, Int64(0))) == found.step
          && group.float(2) == found.rate,
        "its optimizer groups have other names, or stand at different steps or rates")
      found.groups.append([])
      let entries = try group.tables(3)
      outline.text("group\(index)")
      outline.number(Int64(found.step))
      outline.float(found.rate)
      outline.count(entries.count)
      for entry in entries {
        let name = try entry.text(0)
        outline.text(name)
        guard let owner = state.parameters[name], owner.trainable, seen.insert(name).inserted else {
          throw Corrupt(reason: "the optimizer state of '\(name)' is there twice or without it")
        }
        let shape = owner.value.shape
        let moments = try tensors(entry.tables(1), of: name)
        for (i, (label, moment)) in moments.enumerated() {
          try require(
            label == "momentum\(i)" && moment.elementType == owner.value.elementType
              && moment.shape.count == shape.count
              && zip(moment.shape, shape).allSatisfy { $0 == 1 || $0 == $1 },
            "'\(label)' of '\(name)' has another shape or type than it")
        }
        found.moments.append((name, moments.map(\.1)))
        found.groups[index].append(name)
        try require(
          moments.count == found.moments[0].values.count, "its optimizer state is uneven")
      }
    }
    for (name, parameter) in state.parameters where !seen.isEmpty {
      try require(seen.contains(name) == parameter.trainable, "it lacks optimizer state")
    }
    return found
  }

  private func readProperties(_ bag: FlatTable?, _ state: TrainingState) throws {
    func add(_ entry: FlatTable, _ value: Property) throws {
      let name = try entry.text(0)
      outline.property(name, value)
      try require(
        !name.isEmpty && state.properties.updateValue(value, forKey: name) == nil,
        "a property name, '\(name)', is empty or occurs twice")
    }
    let readers: [(FlatTable) throws -> Property] = [
      { .int(try $0.scalar(1, Int64(0))) }, { .float(try $0.float(1)) },
      { .string(try $0.text(1)) },
    ]
    for (field, read) in readers.enumerated() {
      let entries = try bag?.tables(field) ?? []
      outline.count(entries.count)
      for entry in entries { try add(entry, read(entry)) }
    }
    guard state.optimizer != nil, let kind = state.properties[optimizerProperty] else { return }
    guard case .string(let text) = kind else {
      throw Corrupt(reason: "its \(optimizerProperty) is no text")
    }
    state.optimizer!.kind = text
    state.properties[optimizerProperty] = nil
  }
}

/// What the save before can help against.
private let harmed: Set = [
  "checkpoint-corrupt", "checkpoint-not-found", "checkpoint-unreadable", "checkpoint-version",
  "checkpoint-dtype",
]

func previousPath(_ path: String) -> String { path + ".previous" }

/// What becomes of the save before: nothing; it is the file that is written over; or it stays, as
/// that file is damaged.
enum Previous {
  case none, replaced, kept
}

/// Give the data of a checkpoint that becomes the one before the name that it refers to.
private func shareData(_ dataPath: String, _ before: String, isExternal: Bool) throws {
  let kept = before + ".data"
  if isExternal ? isSame(kept, dataPath) : access(kept, F_OK) != 0 { return }
  unlink(before)  // first what refers to the data
  unlink(kept)
  if isExternal && link(dataPath, kept) != 0 { throw SystemError() }
}

/// What another thread computes.
private final class Computed<Value> {
  private var result: Value?
  private let group = DispatchGroup()

  init(_ compute: @escaping () -> Value) {
    DispatchQueue.global().async(group: group) { self.result = compute() }
  }
  var value: Value {
    group.wait()
    return result!
  }
}

/// Writes one file; above `externalAbove` bytes the tensors go to `<path>.data`, where the current
/// checkpoint has none: killed at any moment, it is whole. While the tensors are written, another
/// thread hashes them.
struct CheckpointWriter {
  private let state: TrainingState, optimizer: OptimizerState?
  private var externalAt: Int?
  private var external: [ORTValue] = []
  private var outline: Outline

  private init(state: TrainingState, optimizer: OptimizerState?, externalAt: Int? = nil) {
    (self.state, self.optimizer, self.externalAt) = (state, optimizer, externalAt)
    outline = Outline(nominal: state.isNominal)
  }

  static func write(
    _ path: String, _ state: TrainingState, withOptimizer: Bool, externalAbove: Int = 1800 << 20,
    previous: Previous = .none
  ) throws {  // a flatbuffer ends below 2 GiB
    let optimizer = withOptimizer && !state.isNominal ? state.optimizer : nil
    let all = state.parameters.values.map(\.value) + (optimizer?.moments.flatMap(\.values) ?? [])
    let total = state.isNominal ? 0 : all.reduce(0) { $0 + $1.byteCount }
    let dataPath = path + ".data", before = previousPath(path)
    let occupied = CheckpointReader.externalStart(previous == .kept ? before : path)
    let keepAs = previous == .replaced ? before : nil
    func share() throws {
      if keepAs != nil { try shareData(dataPath, before, isExternal: occupied != nil) }
    }
    if total <= externalAbove {
      var writer = CheckpointWriter(state: state, optimizer: optimizer)
      var content = FlatWriter(root: writer.root())
      let digests = Computed(writer.outline.digests)
      try writeAtomically(path, previous: keepAs) { file in
        try file.write(content.head)
        for (gap, value) in content.payload {
          let length = withUnsafeBytes(of: UInt32(value.byteCount).littleEndian, Array.init)
          try file.write([UInt8](repeating: 0, count: gap) + length)
          try file.write(value)
        }
        content.fill(digests.value)
        try file.move(to: 0)
        try file.write(content.head)
        try share()
      }
      if occupied != nil { unlink(dataPath) }
      return
    }
    do {
      errno = ELOOP
      if isLink(dataPath) { throw SystemError() }
      let file = try OutputFile(dataPath, O_CREAT)
      let size = lseek(file.descriptor, 0, SEEK_END)
      let start = (occupied ?? .max) >= total ? 0 : Int(size)
      var writer = CheckpointWriter(state: state, optimizer: optimizer, externalAt: start)
      var content = FlatWriter(root: writer.root())
      let digests = Computed(writer.outline.digests)
      try file.move(to: start)
      for value in writer.external { try file.write(value) }
      try file.sync()
      try syncFolder(of: dataPath)
      content.fill(digests.value)
      try writeAtomically(path, previous: keepAs) {
        try $0.write(content.head)
        try share()
      }
      if start == 0 && previous == .none && ftruncate(file.descriptor, off_t(total)) != 0 {
        throw SystemError()
      }
    } catch let error as SystemError {
      throw notWritten(dataPath, error)
    }
  }

  private mutating func tensor(_ name: String, _ value: ORTValue) -> FlatNode {
    var offset: FlatNode?
    let isExternal = externalAt != nil && value.byteCount > 0 && !state.isNominal
    if isExternal {
      offset = .int64(Int64(externalAt!))
      externalAt! += value.byteCount
      external.append(value)
    }
    // raw_data stays absent with external data: the reference looks no further if it is there.
    let bytes: FlatNode? = isExternal ? nil : .bytes(state.isNominal ? nil : value)
    outline.tensor(name, value)
    return .table([
      .text(name), state.isNominal ? nil : .digest, .longs(state.isNominal ? [] : value.shape),
      .int32(Int32(value.elementType.rawValue)), bytes, nil, offset,
    ])
  }

  private mutating func root() -> FlatNode {
    var parameters: [[FlatNode]] = [[], []]
    let sorted = state.parameters.sorted(by: { $0.key < $1.key })
    for (index, isTrainable) in [true, false].enumerated() {
      let own = sorted.filter { $0.value.trainable == isTrainable }
      outline.count(own.count)
      for (name, parameter) in own { parameters[index].append(tensor(name, parameter.value)) }
    }
    var groups: [FlatNode] = []
    let all = optimizer?.moments.map { ($0.name, $0.values) } ?? []
    let moments = Dictionary(uniqueKeysWithValues: all)
    outline.count(optimizer?.groups.count ?? 0)
    for (index, names) in (optimizer?.groups ?? []).enumerated() {
      var entries: [FlatNode] = []
      outline.text("group\(index)")
      outline.number(Int64(optimizer!.step))
      outline.float(optimizer!.rate)
      outline.count(names.filter { moments[$0] != nil }.count)
      for name in names {
        guard let own = moments[name] else { continue }
        outline.text(name)
        outline.count(own.count)
        var nodes: [FlatNode] = []
        for (i, value) in own.enumerated() { nodes.append(tensor("momentum\(i)", value)) }
        entries.append(.table([.text(name), .tables(nodes)]))
      }
      groups.append(
        .table([
          .text("group\(index)"), .int64(Int64(optimizer!.step)), .float(optimizer!.rate),
          .tables(entries),
        ]))
    }
    let module = FlatNode.table([
      .tables(parameters[0]), .tables(parameters[1]), .bool(state.isNominal),
      .bool(externalAt != nil),
    ])
    let bag = properties()
    return .table([.int32(2), module, .tables(groups), bag, .digest])
  }

  private mutating func properties() -> FlatNode? {
    var properties = state.properties
    if let kind = optimizer?.kind, !kind.isEmpty { properties[optimizerProperty] = .string(kind) }
    var lists: [[(name: String, value: Property, node: FlatNode)]] = [[], [], []]
    for (name, value) in properties.sorted(by: { $0.key < $1.key }) {
      switch value {
      case .int(let number): lists[0].append((name, value, .int64(number)))
      case .float(let number): lists[1].append((name, value, .float(number)))
      case .string(let text): lists[2].append((name, value, .text(text)))
      }
    }
    for list in lists {
      outline.count(list.count)
      for entry in list { outline.property(entry.name, entry.value) }
    }
    if properties.isEmpty { return nil }
    return .table(lists.map { .tables($0.map { .table([.text($0.name), $0.node]) }) })
  }
}
