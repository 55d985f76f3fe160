//! What the crypto path costs.
fn main() {}
