//! `fv` as a process, driven by `wg` and `wg-quick`. What makes interfaces needs root and these programs: without
//! them such a test prints why it is skipped, and with FV_NO_SKIP set it fails. Each interface is in a network
//! namespace that goes away with its test.

mod demo;
mod doctor;
mod life;
mod place;
mod router;
mod settings;
mod up;
mod watched;
