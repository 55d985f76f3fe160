//! `fv up` without a file: the same keys from environment variables, for containers whose only way in they are. Becomes
//! the text of a file, so that there is one reader and one set of rules. Called by `up`.

use zeroize::Zeroizing;

/// Variables of [Interface], and the keys that they stand for.
const INTERFACE: [(&str, &str); 7] = [
    ("FV_PRIVATE_KEY", "PrivateKey"),
    ("FV_LISTEN_PORT", "ListenPort"),
    ("FV_FWMARK", "FwMark"),
    ("FV_ADDRESS", "Address"),
    ("FV_DNS", "DNS"),
    ("FV_MTU", "MTU"),
    ("FV_TABLE", "Table"),
];
/// Of a [Peer], after FV_PEER_, or FV_PEER2_ and so on.
const PEER: [(&str, &str); 5] = [
    ("PUBLIC_KEY", "PublicKey"),
    ("PRESHARED_KEY", "PresharedKey"),
    ("ALLOWED_IPS", "AllowedIPs"),
    ("ENDPOINT", "Endpoint"),
    ("PERSISTENT_KEEPALIVE", "PersistentKeepalive"),
];
/// FV_PEER99_PUBLIC_KEY is the last.
const MOST_PEERS: usize = 99;

/// A file in the format of wg-quick, and where each of its lines comes from.
#[derive(Debug)]
pub(crate) struct Environment {
    pub(crate) text: Zeroizing<String>,
    /// Names of variables, by line.
    pub(crate) lines: Vec<String>,
}

impl Environment {
    /// Out of the variables that `get` finds. A key may also be in a file: FV_PRIVATE_KEY_FILE names it.
    ///
    /// # Errors
    /// One sentence: nothing is there, a file cannot be read, or a value has more than one line.
    pub(crate) fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        // Room enough that no copy of a key stays behind where the text was before.
        let mut made =
            Self { text: Zeroizing::new(String::with_capacity(1 << 16)), lines: vec![String::new()] };
        made.text.push_str("[Interface]\n");
        for (variable, key) in INTERFACE {
            made.add(&get, variable, key)?;
        }
        for number in 1..=MOST_PEERS {
            let prefix = if number == 1 { "FV_PEER".to_owned() } else { format!("FV_PEER{number}") };
            let first = format!("{prefix}_{}", PEER[0].0);
            if PEER.iter().all(|(word, _)| get(&format!("{prefix}_{word}")).is_none()) {
                continue;
            }
            made.text.push_str("[Peer]\n");
            made.lines.push(first);
            for (word, key) in PEER {
                made.add(&get, &format!("{prefix}_{word}"), key)?;
            }
        }
        if made.lines.len() == 1 {
            return Err("give a FILE, or set FV_PRIVATE_KEY, FV_ADDRESS, FV_PEER_PUBLIC_KEY and so on".into());
        }
        Ok(made)
    }

    fn add(&mut self, get: impl Fn(&str) -> Option<String>, variable: &str, key: &str) -> Result<(), String> {
        let in_file = format!("{variable}_FILE");
        let path = get(&in_file).filter(|_| variable.ends_with("_KEY"));
        let value = match (get(variable), path) {
            (Some(value), None) => Zeroizing::new(value),
            (None, Some(path)) => Zeroizing::new(
                std::fs::read_to_string(&path)
                    .map_err(|e| format!("{in_file}: cannot read {}: {e}", crate::uapi::shown(&path)))?,
            ),
            (Some(_), Some(_)) => return Err(format!("{variable} and {in_file} are both set; keep one")),
            (None, None) => return Ok(()),
        };
        let value = value.trim();
        if value.contains(|c: char| c.is_control() || c == '#') {
            return Err(format!("{variable}: the value is one line without #"));
        }
        for part in [key, " = ", value, "\n"] {
            self.text.push_str(part);
        }
        self.lines.push(variable.to_owned());
        Ok(())
    }

    /// The variable that a line of the text stands for, counted from 1.
    pub(crate) fn variable(&self, line: usize) -> &str {
        let name = line.checked_sub(1).and_then(|line| self.lines.get(line));
        name.map_or("the environment", |name| if name.is_empty() { "the environment" } else { name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigFile;

    const KEY: &str = "AKeZaHwBxjiKLFnkY2unvEdOTtg4AL+M9dQXfopFVFk=";

    fn read(variables: &[(&str, &str)]) -> Result<Environment, String> {
        Environment::read(|name| {
            variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn what_a_file_can_say_of_a_tunnel_its_variables_say_too() {
        let made = read(&[
            ("FV_PRIVATE_KEY", KEY),
            ("FV_ADDRESS", "10.8.0.2/24, fd08::2/64"),
            ("FV_LISTEN_PORT", "51820"),
            ("FV_MTU", "1380"),
            ("FV_PEER_PUBLIC_KEY", KEY),
            ("FV_PEER_ENDPOINT", "vpn.example.org:51820"),
            ("FV_PEER_ALLOWED_IPS", "0.0.0.0/0"),
            ("FV_PEER_PERSISTENT_KEEPALIVE", "25"),
            ("FV_PEER7_PUBLIC_KEY", KEY),
            ("FV_PEER7_PRESHARED_KEY", KEY),
        ])
        .expect("good");
        let file = ConfigFile::parse(made.text.as_bytes()).expect("good");
        assert_eq!((file.interface.addresses.len(), file.interface.mtu), (2, Some(1380)));
        assert_eq!(file.interface.listen_port, Some(51820));
        assert_eq!((file.peers[0].persistent_keepalive, file.peers.len()), (Some(25), 2));
        assert_eq!(file.peers[0].endpoint.as_ref().expect("there").to_string(), "vpn.example.org:51820");
        assert!(file.peers[1].preshared_key.is_some());
    }

    #[test]
    fn a_key_may_be_in_a_file_and_not_in_both_places() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), format!("{KEY}\n")).expect("written");
        let path = file.path().to_str().expect("text");
        let made = read(&[("FV_PRIVATE_KEY_FILE", path)]).expect("good");
        assert_eq!(*made.text, format!("[Interface]\nPrivateKey = {KEY}\n"));
        let both = read(&[("FV_PRIVATE_KEY", KEY), ("FV_PRIVATE_KEY_FILE", path)]);
        assert!(both.expect_err("two").contains("keep one"));
        let none = read(&[("FV_PRIVATE_KEY_FILE", "/nowhere")]);
        assert!(none.expect_err("no file").starts_with("FV_PRIVATE_KEY_FILE: cannot read"));
    }

    #[test]
    fn a_wrong_value_is_told_with_its_variable_and_nothing_can_be_smuggled_in() {
        let made =
            read(&[("FV_PRIVATE_KEY", KEY), ("FV_ADDRESS", "10.8.0.2/33"), ("FV_PEER_ENDPOINT", "x:1")]);
        let made = made.expect("text");
        let problems =
            ConfigFile::parse(made.text.as_bytes()).expect_err("bad").told(|line| made.variable(line).into());
        assert!(problems.contains("FV_ADDRESS: Address = 10.8.0.2/33"), "{problems}");
        assert!(problems.contains("FV_PEER_PUBLIC_KEY: [Peer] has no PublicKey"), "{problems}");
        for value in ["1380\nPostUp = id", "1380 # x"] {
            assert!(read(&[("FV_MTU", value)]).expect_err("two lines").starts_with("FV_MTU: "));
        }
        assert!(read(&[]).expect_err("nothing").starts_with("give a FILE"));
    }
}
