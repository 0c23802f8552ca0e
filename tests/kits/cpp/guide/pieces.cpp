#include <iostream>
#include <odtpack/odtpack.hpp>
// The declarations of <openssl/evp.h> that the guide uses.
struct EVP_PKEY;
struct EVP_MD_CTX;
struct EVP_PKEY_CTX;
struct EVP_MD;
struct ENGINE;
extern "C" {
EVP_MD_CTX* EVP_MD_CTX_new();
void EVP_MD_CTX_free(EVP_MD_CTX*);
int EVP_DigestVerifyInit(EVP_MD_CTX*, EVP_PKEY_CTX**, const EVP_MD*, ENGINE*, EVP_PKEY*);
int EVP_DigestVerify(EVP_MD_CTX*, const unsigned char*, size_t, const unsigned char*, size_t);
}
EVP_PKEY* PublicKey();
/* signature */
void Loop(const Ort::Env& env, const std::vector<std::vector<Ort::Value>>& batches) {
/* loop */
}
void Generate(const Ort::Env& env, const std::vector<std::vector<Ort::Value>>& batches) {
/* generate */
}
void CarryOver(const Ort::Env& env, const odtpack::Package& newer) {
/* newer */
}
void Update(const odtpack::Package::SignatureCheck& is_signed) {
/* update */
}
void InOrtFormat(const Ort::Env& env, const odtpack::Package& package,
                 const odtpack::CheckpointState& state) {
/* minimal */
}
/* former */
void Formerly(const Ort::CheckpointState& state) {
  Ort::CheckpointState::SaveCheckpoint(state, "trained.ckpt", true);
}
