import BackgroundTasks
import UIKit
import os

/// A background task that trains while the phone charges and is idle, for as long as the system
/// lets it. The app calls `register` before it has finished launching.
enum TrainingTask {
  static let identifier = "org.odtpack.sample.training"  // also in Info.plist
  private static let log = Logger(subsystem: "org.odtpack.sample", category: "training")

  static func register() {
    BGTaskScheduler.shared.register(forTaskWithIdentifier: identifier, using: nil) { task in
      start(task as! BGProcessingTask)
    }
  }

  static func schedule() {
    let request = BGProcessingTaskRequest(identifier: identifier)
    request.requiresExternalPower = true
    request.requiresNetworkConnectivity = false
    do {
      try BGTaskScheduler.shared.submit(request)
    } catch {
      log.error("The training was not scheduled: \(error.localizedDescription)")
    }
  }

  private static func start(_ task: BGProcessingTask) {
    guard let package = Bundle.main.url(forResource: "package", withExtension: nil) else {
      return task.setTaskCompleted(success: false)
    }
    let files = FileManager.default.urls(for: .documentDirectory, in: .userDomainMask)[0]
    let trainer = Trainer(package: package, files: files)
    // There are seconds left to save.
    task.expirationHandler = { trainer.stop("the system takes the task back") }
    let memory = NotificationCenter.default.addObserver(
      forName: UIApplication.didReceiveMemoryWarningNotification, object: nil, queue: nil
    ) { _ in trainer.stop("memory is short") }
    DispatchQueue.global(qos: .utility).async {
      defer { NotificationCenter.default.removeObserver(memory) }
      do {
        let isDone = try trainer.run {
          let state = ProcessInfo.processInfo.thermalState
          return state == .nominal || state == .fair
        }
        if !isDone { schedule() }
        task.setTaskCompleted(success: true)
      } catch {
        // Not again by itself: it would fail again. The last checkpoint holds.
        log.error("Training failed: \(error.localizedDescription)")
        task.setTaskCompleted(success: false)
      }
    }
  }
}
