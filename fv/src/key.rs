//! Keys as text for people: base64 as `wg` writes it, and the commands `genkey`, `pubkey` and `genpsk`.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;

use base64ct::{Base64, Encoding};
use forestvpn_quantum::time::{Entropy, OsEntropy};
use forestvpn_quantum::{PrivateKey, PublicKey};
use zeroize::Zeroizing;

/// What a key looks like, for error texts.
pub(crate) const FORM: &str = "a key is 44 base64 characters, the last of them '='";

/// Reads 44 base64 characters, in constant time.
pub(crate) fn from_base64(text: &str) -> Option<Zeroizing<[u8; 32]>> {
    let mut bytes = Zeroizing::new([0; 32]);
    let full = text.len() == 44 && Base64::decode(text, &mut *bytes).is_ok_and(|out| out.len() == 32);
    full.then_some(bytes)
}

/// Writes 44 base64 characters, in constant time.
pub(crate) fn to_base64(bytes: &[u8; 32]) -> Zeroizing<String> {
    Zeroizing::new(Base64::encode_string(bytes))
}

/// A private key as `wg` files have it.
pub(crate) fn private_text(key: &PrivateKey) -> Zeroizing<String> {
    to_base64(key.as_bytes())
}

/// A public key as people know it.
pub(crate) fn public_text(key: &PublicKey) -> String {
    Base64::encode_string(key.as_bytes())
}

/// `fv genkey`: a new private key on standard output.
///
/// # Errors
/// When standard output cannot be written.
pub(crate) fn genkey() -> io::Result<()> {
    let key = PrivateKey::new(*random());
    print_secret(key.as_bytes())
}

/// `fv genpsk`: a new preshared key on standard output.
///
/// # Errors
/// When standard output cannot be written.
pub(crate) fn genpsk() -> io::Result<()> {
    print_secret(&random())
}

/// `fv pubkey`: the public key that belongs to the private key on `input`.
///
/// # Errors
/// When `input` is no private key, or one of the two cannot be read or written.
pub(crate) fn pubkey(input: impl Read, output: &mut impl Write) -> io::Result<()> {
    // One byte more than a key with a generous line end, so that anything longer is noticed.
    let mut bytes = Zeroizing::new(Vec::with_capacity(64));
    input.take(64).read_to_end(&mut bytes)?;
    let text = std::str::from_utf8(&bytes).unwrap_or_default().trim();
    let key = from_base64(text).ok_or_else(|| {
        let hint = format!("this is no private key: {FORM}; try: fv genkey | fv pubkey");
        io::Error::new(io::ErrorKind::InvalidInput, hint)
    })?;
    writeln!(output, "{}", public_text(&PrivateKey::new(*key).public_key()))
}

fn random() -> Zeroizing<[u8; 32]> {
    let mut bytes = Zeroizing::new([0; 32]);
    OsEntropy.fill(&mut *bytes);
    bytes
}

fn print_secret(bytes: &[u8; 32]) -> io::Result<()> {
    if others_may_read(&io::stdout()) {
        eprintln!(
            "fv: warning: other users may read the file that this key goes to; `umask 077` first helps."
        );
    }
    let text = to_base64(bytes);
    // Standard output keeps what it writes until it is flushed; the line end flushes it.
    let mut out = io::stdout().lock();
    writeln!(out, "{}", *text)?;
    out.flush()
}

/// Whether this is a regular file with any right for users other than its owner and group.
fn others_may_read(out: &impl AsFd) -> bool {
    use std::os::unix::fs::MetadataExt;
    out.as_fd()
        .try_clone_to_owned()
        .and_then(|fd| std::fs::File::from(fd).metadata())
        .is_ok_and(|meta| meta.is_file() && meta.mode() & 0o007 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pubkey_of(input: &str) -> io::Result<String> {
        let mut out = Vec::new();
        pubkey(input.as_bytes(), &mut out)?;
        Ok(String::from_utf8(out).expect("text"))
    }

    // Key pairs of Wireshark's public WireGuard captures.
    const PAIRS: [(&str, &str); 2] = [
        ("AKeZaHwBxjiKLFnkY2unvEdOTtg4AL+M9dQXfopFVFk=", "Igge9KzRytKNwrgkzDE/8hrLu6Ly0OqVdvOPWhA5KR4="),
        ("cFIxTUyBs1Qil414hBwEgvasEax8CKJ5IS5ZougplWs=", "YDCttCs9e1J52/g9vEnwJJa+2x6RqaayAYMpSVQfGEY="),
    ];

    #[test]
    fn pubkey_gives_the_public_key_of_known_pairs() {
        for (private, public) in PAIRS {
            assert_eq!(pubkey_of(private).expect("valid"), format!("{public}\n"));
            assert_eq!(pubkey_of(&format!("  {private}\r\n")).expect("valid"), format!("{public}\n"));
        }
    }

    #[test]
    fn pubkey_refuses_what_is_no_key_and_does_not_repeat_it() {
        let private = PAIRS[0].0;
        for input in [
            "".to_owned(),
            "\n".to_owned(),
            private[..43].to_owned(),
            format!("{private}A"),
            format!("{private} {private}"),
            private.replace('=', "A"),
            private.replace("Fk=", "Fl="),
            "\u{fe}".repeat(22),
        ] {
            let text = pubkey_of(&input).expect_err(&input).to_string();
            assert!(text.contains("44 base64 characters") && !text.contains("AKeZaHwB"), "{text}");
        }
    }

    #[test]
    fn base64_goes_both_ways() {
        let bytes = random();
        assert_eq!(from_base64(&to_base64(&bytes)).as_deref(), Some(&*bytes));
    }
}
