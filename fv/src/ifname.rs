//! What may be the name of a network interface. Checked by `cli` and `up` before anything is opened.

/// Says in plain words why `name` cannot be the name of a Linux network interface.
///
/// # Errors
/// The reason, for the person who chose the name.
pub(crate) fn check(name: &str) -> Result<(), String> {
    let reason = match name {
        "" => "it is empty",
        "." | ".." => "the kernel does not take this name",
        _ if name.len() > 15 => {
            return Err(format!("it has {} bytes, at most 15 are possible", name.len()));
        }
        _ if name.contains('/') => "it has a / in it",
        _ if name.contains([':', '%']) => "it has a : or % in it",
        _ if name.contains(char::is_whitespace) => "it has a space in it",
        _ if name.contains(char::is_control) => "it has a control character in it",
        _ => return Ok(()),
    };
    Err(reason.to_owned())
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn names_the_kernel_takes_pass_and_all_others_are_refused_with_the_reason() {
        for name in ["w", "wg0", "wg-0_x=+.1", "abcdefghijklmno", "..."] {
            assert_eq!(check(name), Ok(()), "{name}");
        }
        for (name, part) in [
            ("", "empty"),
            ("abcdefghijklmnop", "16 bytes"),
            ("äöüäöüäö", "16 bytes"),
            ("a/b", "/"),
            (".", "kernel"),
            ("..", "kernel"),
            ("w g", "space"),
            ("wg\n", "space"),
            ("wg\u{7f}", "control"),
            ("wg%d", "%"),
            ("wg0:1", ":"),
        ] {
            let reason = check(name).expect_err(name);
            assert!(reason.contains(part), "{name:?}: {reason}");
        }
    }
}
