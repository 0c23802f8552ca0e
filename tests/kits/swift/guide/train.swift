import Foundation
let words = CommandLine.arguments
var left = Int(words[3])!
let (package, files) = (URL(fileURLWithPath: words[1]), URL(fileURLWithPath: words[2]))
let trainer = Trainer(package: package, files: files)
let isDone = try trainer.run {
  left -= 1
  if words.count > 4 && left == 0 { trainer.stop(words[4]) }
  return words.count > 4 || left > 0
}
print(isDone)
