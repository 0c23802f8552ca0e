import SwiftUI

@main
struct SampleApp: App {
  @Environment(\.scenePhase) private var phase

  init() { TrainingTask.register() }

  var body: some Scene {
    WindowGroup { Text("Trains while the phone charges.") }
      .onChange(of: phase) { phase in
        if phase == .background { TrainingTask.schedule() }
      }
  }
}
