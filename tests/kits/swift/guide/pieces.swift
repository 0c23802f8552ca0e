import Foundation
func loop(_ files: URL, _ batches: [[ORTValue]]) throws {
/* loop */
}
func generate(_ env: ORTEnv, _ batches: [[ORTValue]]) async throws {
/* generate */
}
/* app */
func carryOver(_ env: ORTEnv, _ newer: TrainingPackage) throws {
/* newer */
}
func update(_ publicKey: Data) throws {
/* update */
}
