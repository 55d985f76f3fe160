//! The text of WireGuard's cross-platform configuration protocol (UAPI), both directions, without any I/O:
//! lines of a `set` become a [`DeviceUpdate`], a [`DeviceSnapshot`] becomes the answer to a `get` and back.
//!
//! Called by `control` (server side) and `show` (client side). Source: www.wireguard.com/xplatform.

use std::fmt;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::time::Duration;

use forestvpn_quantum::config::{AllowedIp, DeviceSnapshot, DeviceUpdate, PeerSnapshot, PeerUpdate};
use forestvpn_quantum::{PresharedKey, PrivateKey, PublicKey};
use ipnet::IpNet;
use nix::errno::Errno;
use zeroize::Zeroizing;

/// Longest accepted line in bytes, without its newline.
pub(crate) const MAX_LINE: usize = 4096;

/// Why a `set` was refused. Its text names the line, the key and the value, but never a secret.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SetError {
    /// What the client is told, as a positive number; on the wire it is negative.
    pub(crate) errno: Errno,
    /// Line of the request, counted from 1, which is `set=1` itself.
    pub(crate) line: usize,
    problem: String,
}

impl fmt::Display for SetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.problem)
    }
}

impl std::error::Error for SetError {}

/// One complaint about one line, before it is known which line that is.
struct Bad(Errno, String);

impl Bad {
    fn value(key: &str, value: &str, allowed: &str) -> Self {
        Self(Errno::EINVAL, format!("{key}={}: {allowed}", shown(value)))
    }
}

/// A value as the log may show it: control characters escaped, not longer than a line on a screen.
pub(crate) fn shown(value: &str) -> String {
    let mut text: String = value.chars().take(64).flat_map(char::escape_debug).collect();
    if value.chars().nth(64).is_some() {
        text.push_str("...");
    }
    text
}

/// A word that should be a keyword, as the log may show it; anything that could be a key stays hidden.
pub(crate) fn shown_keyword(word: &str) -> &str {
    let plain = !word.is_empty()
        && word.len() <= 32
        && word.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
    if plain { word } else { "(not shown)" }
}

/// Reads one `set` request line by line. Nothing is applied by it: [`SetParser::finish`] gives the whole
/// change or the first mistake.
pub(crate) struct SetParser<'a> {
    update: DeviceUpdate,
    /// Index in `update.peers` where the section of the current `public_key` line begins.
    section: Option<usize>,
    line: usize,
    failed: Option<SetError>,
    /// Interface name to index, for endpoints such as `[fe80::1%eth0]:51820`.
    scope: &'a dyn Fn(&str) -> Option<u32>,
}

impl<'a> SetParser<'a> {
    /// Starts after the line `set=1`. `scope` turns an interface name into its index.
    pub(crate) fn new(scope: &'a dyn Fn(&str) -> Option<u32>) -> Self {
        Self { update: DeviceUpdate::default(), section: None, line: 1, failed: None, scope }
    }

    /// Takes one line without its newline. After the first mistake the rest is only counted, so that the
    /// connection stays in step up to the empty line.
    pub(crate) fn line(&mut self, raw: &[u8]) {
        self.line = self.line.saturating_add(1);
        if self.failed.is_some() {
            return;
        }
        if let Err(Bad(errno, problem)) = self.parse(raw) {
            self.fail(errno, problem);
        }
    }

    /// Takes note of a line that was longer than [`MAX_LINE`] and was thrown away.
    pub(crate) fn long_line(&mut self) {
        self.line = self.line.saturating_add(1);
        if self.failed.is_none() {
            self.fail(Errno::EINVAL, format!("longer than {MAX_LINE} bytes"));
        }
    }

    /// The request ended (connection closed, timeout) before its empty line.
    pub(crate) fn cut_short(&mut self) {
        if self.failed.is_none() {
            self.fail(Errno::EPROTO, "the request ends here, without the empty line at its end".into());
        }
    }

    /// The whole change, or the first mistake.
    ///
    /// # Errors
    /// When any line was wrong; then nothing of the request may be applied.
    pub(crate) fn finish(self) -> Result<DeviceUpdate, SetError> {
        match self.failed {
            Some(error) => Err(error),
            None => Ok(self.update),
        }
    }

    fn fail(&mut self, errno: Errno, problem: String) {
        self.update = DeviceUpdate::default();
        self.failed = Some(SetError { errno, line: self.line, problem });
    }

    fn parse(&mut self, raw: &[u8]) -> Result<(), Bad> {
        if raw.len() > MAX_LINE {
            return Err(Bad(Errno::EINVAL, format!("longer than {MAX_LINE} bytes")));
        }
        let text = std::str::from_utf8(raw).ok().filter(|text| !text.contains(char::is_control));
        let Some(text) = text else {
            return Err(Bad(Errno::EINVAL, "has a control character or a byte that is no text".into()));
        };
        let Some((key, value)) = text.split_once('=') else {
            return Err(Bad(Errno::EPROTO, "has no '='; every line is key=value".into()));
        };
        if key == "public_key" {
            self.section = Some(self.update.peers.len());
            self.update.peers.push(PeerUpdate::new(PublicKey(*public_key(key, value)?)));
            return Ok(());
        }
        match self.section {
            None => self.device_line(key, value),
            Some(start) => self.peer_line(start, key, value),
        }
    }

    fn device_line(&mut self, key: &str, value: &str) -> Result<(), Bad> {
        match key {
            "private_key" => {
                let bytes = secret_key(key, value)?;
                self.update.private_key = Some(is_set(&bytes).then(|| PrivateKey::new(*bytes)));
            }
            "listen_port" => self.update.listen_port = Some(number(key, value, "a port is 0 to 65535")?),
            "fwmark" => self.update.fwmark = Some(number(key, value, "a mark is 0 to 4294967295")?),
            "replace_peers" => {
                only_true(key, value)?;
                self.update.replace_peers = true;
            }
            _ if PEER_KEYS.contains(&key) => {
                return Err(Bad(Errno::EINVAL, format!("{key} belongs to a peer; put it after public_key")));
            }
            _ => return Err(unknown(key)),
        }
        Ok(())
    }

    fn peer_line(&mut self, start: usize, key: &str, value: &str) -> Result<(), Bad> {
        let Some(peer) = self.update.peers.last_mut() else {
            return Err(unknown(key));
        };
        match key {
            // These two hold for the whole section, wherever they stand in it.
            "remove" => {
                only_true(key, value)?;
                self.update.peers.iter_mut().skip(start).for_each(|peer| peer.remove = true);
            }
            "update_only" => {
                only_true(key, value)?;
                self.update.peers.iter_mut().skip(start).for_each(|peer| peer.update_only = true);
            }
            "preshared_key" => {
                let bytes = secret_key(key, value)?;
                peer.preshared_key = Some(is_set(&bytes).then(|| PresharedKey::new(*bytes)));
            }
            "endpoint" => peer.endpoint = Some(endpoint(key, value, self.scope)?),
            "persistent_keepalive_interval" => {
                peer.persistent_keepalive =
                    Some(number(key, value, "an interval is 0 (off) to 65535 seconds")?);
            }
            "replace_allowed_ips" => {
                only_true(key, value)?;
                if peer.allowed_ips.is_empty() {
                    peer.replace_allowed_ips = true;
                } else {
                    // Lines count in their order: what was added above is added (and so taken from other
                    // peers) and then removed again.
                    let mut rest = PeerUpdate::new(peer.public_key);
                    rest.update_only = peer.update_only;
                    rest.remove = peer.remove;
                    rest.replace_allowed_ips = true;
                    self.update.peers.push(rest);
                }
            }
            "allowed_ip" => peer.allowed_ips.push(allowed_ip(key, value)?),
            "protocol_version" => {
                if value != "1" {
                    let problem = format!("protocol_version={}: only 1 is spoken", shown(value));
                    return Err(Bad(Errno::EPFNOSUPPORT, problem));
                }
            }
            _ if DEVICE_KEYS.contains(&key) => {
                let problem = format!("{key} belongs to the interface; put it before the first public_key");
                return Err(Bad(Errno::EINVAL, problem));
            }
            _ => return Err(unknown(key)),
        }
        Ok(())
    }
}

const DEVICE_KEYS: [&str; 4] = ["private_key", "listen_port", "fwmark", "replace_peers"];
const PEER_KEYS: [&str; 8] = [
    "remove",
    "update_only",
    "preshared_key",
    "endpoint",
    "persistent_keepalive_interval",
    "replace_allowed_ips",
    "allowed_ip",
    "protocol_version",
];

fn unknown(key: &str) -> Bad {
    Bad(Errno::EINVAL, format!("the key {} is not known", shown_keyword(key)))
}

fn only_true(key: &str, value: &str) -> Result<(), Bad> {
    if value == "true" { Ok(()) } else { Err(Bad::value(key, value, "the only value is true")) }
}

/// Decimal digits and nothing else: no sign, no spaces.
fn number<T: std::str::FromStr>(key: &str, value: &str, allowed: &str) -> Result<T, Bad> {
    let digits = value.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| value.parse().ok()).flatten().ok_or_else(|| Bad::value(key, value, allowed))
}

fn hex32(value: &str) -> Option<Zeroizing<[u8; 32]>> {
    let mut bytes = Zeroizing::new([0; 32]);
    let full = base16ct::mixed::decode(value, &mut *bytes).is_ok_and(|out| out.len() == 32);
    full.then_some(bytes)
}

/// All zeros stand for "none". Looks at every byte, whatever the first ones are.
fn is_set(bytes: &[u8; 32]) -> bool {
    bytes.iter().fold(0, |seen, byte| seen | byte) != 0
}

fn secret_key(key: &str, value: &str) -> Result<Zeroizing<[u8; 32]>, Bad> {
    hex32(value).ok_or_else(|| {
        Bad(Errno::EINVAL, format!("{key} (not shown, {} characters): a key is 64 hex digits", value.len()))
    })
}

fn public_key(key: &str, value: &str) -> Result<Zeroizing<[u8; 32]>, Bad> {
    hex32(value).ok_or_else(|| Bad::value(key, value, "a key is 64 hex digits"))
}

fn endpoint(key: &str, value: &str, scope: &dyn Fn(&str) -> Option<u32>) -> Result<SocketAddr, Bad> {
    let bad = |allowed| Bad::value(key, value, allowed);
    let address = match scoped(value) {
        Some((plain, name)) => {
            let mut address: SocketAddrV6 = plain.parse().map_err(|_| bad(ENDPOINT_FORM))?;
            let index =
                if name.bytes().all(|b| b.is_ascii_digit()) { name.parse().ok() } else { scope(name) };
            address.set_scope_id(index.ok_or_else(|| bad("there is no such interface after the %"))?);
            SocketAddr::V6(address)
        }
        None => value.parse().map_err(|_| bad(ENDPOINT_FORM))?,
    };
    if address.port() == 0 {
        return Err(bad("the port is 1 to 65535"));
    }
    Ok(match address {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => SocketAddr::new(IpAddr::V4(v4), v6.port()),
            None => address,
        },
        SocketAddr::V4(_) => address,
    })
}

const ENDPOINT_FORM: &str = "an endpoint is 192.0.2.1:51820 or [2001:db8::1]:51820";

/// `[fe80::1%eth0]:51820` as the address without its scope, and the scope.
fn scoped(value: &str) -> Option<(String, &str)> {
    let (host, rest) = value.strip_prefix('[')?.split_once('%')?;
    let (name, port) = rest.split_once(']')?;
    Some((format!("[{host}]{port}"), name)).filter(|_| !name.is_empty())
}

fn allowed_ip(key: &str, value: &str) -> Result<AllowedIp, Bad> {
    let bad = |allowed| Bad::value(key, value, allowed);
    let (remove, prefix) = match value.strip_prefix('-') {
        Some(prefix) => (true, prefix),
        None => (false, value),
    };
    let form = "an allowed IP is 10.0.0.0/8 or fd00::/8, with - in front to remove it";
    let (address, length) = prefix.split_once('/').ok_or_else(|| bad(form))?;
    let address: IpAddr = address.parse().map_err(|_| bad(form))?;
    let limit = if address.is_ipv4() { "the length is 0 to 32" } else { "the length is 0 to 128" };
    let length: u8 = number(key, length, limit).map_err(|_| bad(limit))?;
    let net = IpNet::new(address, length).map_err(|_| bad(limit))?;
    Ok(AllowedIp { net: net.trunc(), remove })
}

/// The answer to a `get`, with `errno=0` and the empty line at its end. It holds the private key: the buffer
/// is made in one piece and wiped when it is dropped.
pub(crate) fn get_answer(device: &DeviceSnapshot) -> Zeroizing<String> {
    let mut length = Counted(0);
    let mut text = Zeroizing::new(String::new());
    // Writing to either of them cannot fail.
    let _ = write_get(&mut length, device);
    text.reserve_exact(length.0);
    let _ = write_get(&mut *text, device);
    text
}

struct Counted(usize);

impl fmt::Write for Counted {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0 = self.0.saturating_add(text.len());
        Ok(())
    }
}

/// 32 bytes as lower-case hex, without a copy that nobody wipes.
struct Hex<'a>(&'a [u8; 32]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut digits = Zeroizing::new([0; 64]);
        f.write_str(base16ct::lower::encode_str(self.0, &mut *digits).map_err(|_| fmt::Error)?)
    }
}

fn write_get(out: &mut impl fmt::Write, device: &DeviceSnapshot) -> fmt::Result {
    if let Some(key) = &device.private_key {
        writeln!(out, "private_key={}", Hex(key.as_bytes()))?;
    }
    writeln!(out, "listen_port={}", device.listen_port)?;
    if device.fwmark != 0 {
        writeln!(out, "fwmark={}", device.fwmark)?;
    }
    for peer in &device.peers {
        write_peer(out, peer)?;
    }
    out.write_str("errno=0\n\n")
}

fn write_peer(out: &mut impl fmt::Write, peer: &PeerSnapshot) -> fmt::Result {
    writeln!(out, "public_key={}", Hex(peer.public_key.as_bytes()))?;
    let preshared_key = peer.preshared_key.as_ref().map_or(&[0; 32], PresharedKey::as_bytes);
    writeln!(out, "preshared_key={}", Hex(preshared_key))?;
    writeln!(out, "protocol_version=1")?;
    if let Some(endpoint) = peer.endpoint {
        writeln!(out, "endpoint={endpoint}")?;
    }
    let handshake = peer.last_handshake.unwrap_or_default();
    writeln!(out, "last_handshake_time_sec={}", handshake.as_secs())?;
    writeln!(out, "last_handshake_time_nsec={}", handshake.subsec_nanos())?;
    writeln!(out, "tx_bytes={}", peer.tx_bytes)?;
    writeln!(out, "rx_bytes={}", peer.rx_bytes)?;
    writeln!(out, "persistent_keepalive_interval={}", peer.persistent_keepalive)?;
    peer.allowed_ips.iter().try_for_each(|net| writeln!(out, "allowed_ip={net}"))
}

/// Why the answer to a `get` could not be read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum GetError {
    /// The other side refused with this errno.
    Refused(i32),
    /// This line of the answer (counted from 1) makes no sense.
    Line(usize),
    /// The answer ends before its errno line.
    CutShort,
}

impl fmt::Display for GetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(errno) => {
                write!(f, "it refused: {}", Errno::from_raw(errno.saturating_abs()).desc())
            }
            Self::Line(line) => write!(f, "line {line} of its answer is not understood"),
            Self::CutShort => f.write_str("its answer ends too early"),
        }
    }
}

impl std::error::Error for GetError {}

/// Reads the answer to a `get` back. Unknown keys are passed over, as `wg` does.
///
/// # Errors
/// See [`GetError`].
pub(crate) fn parse_get(text: &str, scope: &dyn Fn(&str) -> Option<u32>) -> Result<DeviceSnapshot, GetError> {
    let mut device = DeviceSnapshot::default();
    for (index, line) in text.lines().enumerate() {
        let bad = GetError::Line(index.saturating_add(1));
        if let Some(errno) = line.strip_prefix("errno=") {
            return match errno.parse() {
                Ok(0) => Ok(device),
                Ok(errno) => Err(GetError::Refused(errno)),
                Err(_) => Err(bad),
            };
        }
        let read =
            line.split_once('=').is_some_and(|(key, value)| get_line(&mut device, key, value, scope).is_ok());
        if !read {
            return Err(bad);
        }
    }
    Err(GetError::CutShort)
}

fn get_line(
    device: &mut DeviceSnapshot,
    key: &str,
    value: &str,
    scope: &dyn Fn(&str) -> Option<u32>,
) -> Result<(), Bad> {
    let peers = &mut device.peers;
    match (key, peers.last_mut()) {
        ("private_key", None) => {
            let bytes = secret_key(key, value)?;
            device.private_key = is_set(&bytes).then(|| PrivateKey::new(*bytes));
        }
        ("listen_port", None) => device.listen_port = number(key, value, "")?,
        ("fwmark", None) => device.fwmark = number(key, value, "")?,
        ("public_key", _) => peers.push(PeerSnapshot {
            public_key: PublicKey(*public_key(key, value)?),
            preshared_key: None,
            endpoint: None,
            last_handshake: None,
            tx_bytes: 0,
            rx_bytes: 0,
            persistent_keepalive: 0,
            allowed_ips: Vec::new(),
        }),
        ("preshared_key", Some(peer)) => {
            let bytes = secret_key(key, value)?;
            peer.preshared_key = is_set(&bytes).then(|| PresharedKey::new(*bytes));
        }
        ("endpoint", Some(peer)) => peer.endpoint = Some(endpoint(key, value, scope)?),
        ("last_handshake_time_sec", Some(peer)) => {
            let nanos = peer.last_handshake.map_or(0, |t| t.subsec_nanos());
            peer.last_handshake = handshake(number(key, value, "")?, nanos);
        }
        ("last_handshake_time_nsec", Some(peer)) => {
            let nanos: u32 = number(key, value, "")?;
            peer.last_handshake =
                handshake(peer.last_handshake.map_or(0, |t| t.as_secs()), nanos.min(999_999_999));
        }
        ("tx_bytes", Some(peer)) => peer.tx_bytes = number(key, value, "")?,
        ("rx_bytes", Some(peer)) => peer.rx_bytes = number(key, value, "")?,
        ("persistent_keepalive_interval", Some(peer)) => peer.persistent_keepalive = number(key, value, "")?,
        ("allowed_ip", Some(peer)) => peer.allowed_ips.push(allowed_ip(key, value)?.net),
        _ => {}
    }
    Ok(())
}

fn handshake(secs: u64, nanos: u32) -> Option<Duration> {
    (secs != 0 || nanos != 0).then(|| Duration::new(secs, nanos))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: &str = "00aabbccddeeff00112233445566778899aabbccddeeff001122334455667788";
    const OTHER: &str = "11aabbccddeeff00112233445566778899aabbccddeeff001122334455667788";
    const ZERO: &str = "0000000000000000000000000000000000000000000000000000000000000000";

    fn scope(name: &str) -> Option<u32> {
        (name == "eth0").then_some(7)
    }

    fn set(lines: &[&str]) -> Result<DeviceUpdate, SetError> {
        let mut parser = SetParser::new(&scope);
        lines.iter().for_each(|line| parser.line(line.as_bytes()));
        parser.finish()
    }

    fn errno_of(lines: &[&str]) -> Option<Errno> {
        set(lines).err().map(|e| e.errno)
    }

    fn peer(lines: &[&str]) -> PeerUpdate {
        let key = format!("public_key={KEY}");
        let lines: Vec<_> = std::iter::once(key.as_str()).chain(lines.iter().copied()).collect();
        set(&lines).expect("valid").peers.pop().expect("one peer")
    }

    fn key_bytes(hex: &str) -> [u8; 32] {
        *hex32(hex).expect("64 digits")
    }

    #[test]
    fn an_empty_set_changes_nothing() {
        let update = set(&[]).expect("valid");
        assert!(update.private_key.is_none() && update.listen_port.is_none() && update.fwmark.is_none());
        assert!(!update.replace_peers && update.peers.is_empty());
    }

    #[test]
    fn what_wg_setconf_sends_for_an_empty_interface_section_is_read_whole() {
        let update = set(&[
            &format!("private_key={ZERO}"),
            "listen_port=0",
            "fwmark=0",
            "replace_peers=true",
            &format!("public_key={KEY}"),
            "replace_allowed_ips=true",
            "allowed_ip=10.0.0.1/8",
            "allowed_ip=fd00::1/64",
        ])
        .expect("valid");
        assert_eq!(update.private_key, Some(None));
        assert_eq!((update.listen_port, update.fwmark), (Some(0), Some(0)));
        assert!(update.replace_peers);
        let nets: Vec<_> = update.peers[0].allowed_ips.iter().map(|a| a.net.to_string()).collect();
        assert_eq!(nets, ["10.0.0.0/8", "fd00::/64"]);
        assert!(update.peers[0].replace_allowed_ips && !update.peers[0].allowed_ips[0].remove);
    }

    #[test]
    fn a_private_key_is_clamped_and_upper_case_is_read() {
        let update = set(&[&format!("private_key={}", KEY.to_uppercase())]).expect("valid");
        let key = update.private_key.flatten().expect("a key");
        assert_eq!(key, PrivateKey::new(key_bytes(KEY)));
        assert_eq!(key.as_bytes()[31], 0x48);
    }

    #[test]
    fn each_peer_key_fills_its_field() {
        let p = peer(&[
            &format!("preshared_key={OTHER}"),
            "endpoint=192.0.2.1:51820",
            "persistent_keepalive_interval=25",
            "allowed_ip=-10.1.2.3/16",
            "protocol_version=1",
        ]);
        assert_eq!(p.public_key.0, key_bytes(KEY));
        assert_eq!(p.preshared_key, Some(Some(PresharedKey::new(key_bytes(OTHER)))));
        assert_eq!(p.endpoint, Some("192.0.2.1:51820".parse().unwrap()));
        assert_eq!(p.persistent_keepalive, Some(25));
        assert_eq!(p.allowed_ips, [AllowedIp { net: "10.1.0.0/16".parse().unwrap(), remove: true }]);
        assert!(!p.remove && !p.update_only && !p.replace_allowed_ips);
        assert_eq!(peer(&[&format!("preshared_key={ZERO}")]).preshared_key, Some(None));
        assert!(peer(&["remove=true"]).remove);
    }

    #[test]
    fn endpoints_are_read_in_every_numeric_form_and_mapped_ones_become_ipv4() {
        for (text, expected) in [
            ("192.0.2.1:1", "192.0.2.1:1"),
            ("[2001:DB8::1]:65535", "[2001:db8::1]:65535"),
            ("[::ffff:192.0.2.1]:51820", "192.0.2.1:51820"),
            ("[::ffff:c000:201]:51820", "192.0.2.1:51820"),
            ("[fe80::1%3]:5", "[fe80::1%3]:5"),
            ("[fe80::1%eth0]:5", "[fe80::1%7]:5"),
        ] {
            let endpoint = peer(&[&format!("endpoint={text}")]).endpoint;
            assert_eq!(endpoint.map(|e| e.to_string()).as_deref(), Some(expected), "{text}");
        }
    }

    #[test]
    fn update_only_holds_for_its_whole_section_and_for_no_other() {
        let a = format!("public_key={KEY}");
        let b = format!("public_key={OTHER}");
        let update = set(&[&a, "allowed_ip=10.0.0.0/8", "replace_allowed_ips=true", "update_only=true", &b])
            .expect("valid");
        let flags: Vec<_> = update.peers.iter().map(|p| p.update_only).collect();
        assert_eq!(flags, [true, true, false]);
    }

    #[test]
    fn a_repeated_public_key_goes_on_with_the_same_peer() {
        let a = format!("public_key={KEY}");
        let update = set(&[&a, "remove=true", &a, "persistent_keepalive_interval=1"]).expect("valid");
        assert_eq!(update.peers.len(), 2);
        assert!(update.peers[0].remove && !update.peers[1].remove);
        assert_eq!(update.peers[0].public_key, update.peers[1].public_key);
    }

    #[test]
    fn replace_allowed_ips_removes_what_stands_above_it_and_keeps_what_stands_below() {
        let a = format!("public_key={KEY}");
        let update = set(&[&a, "allowed_ip=10.0.0.0/8", "replace_allowed_ips=true", "allowed_ip=11.0.0.0/8"])
            .expect("valid");
        assert_eq!(update.peers.len(), 2);
        assert!(!update.peers[0].replace_allowed_ips && update.peers[1].replace_allowed_ips);
        assert_eq!(update.peers[1].allowed_ips.len(), 1);
    }

    #[test]
    fn bad_lines_are_refused_with_the_errno_that_wg_understands() {
        let key = format!("public_key={KEY}");
        let device: &[(&str, Errno)] = &[
            ("", Errno::EPROTO),
            ("listen_port", Errno::EPROTO),
            ("listen_port=65536", Errno::EINVAL),
            ("listen_port=-1", Errno::EINVAL),
            ("listen_port=+1", Errno::EINVAL),
            ("listen_port=", Errno::EINVAL),
            ("listen_port= 1", Errno::EINVAL),
            ("listen_port=1\r", Errno::EINVAL),
            ("listen_port=1\0", Errno::EINVAL),
            ("Listen_port=1", Errno::EINVAL),
            ("fwmark=4294967296", Errno::EINVAL),
            ("fwmark=0x1", Errno::EINVAL),
            ("private_key=00", Errno::EINVAL),
            ("replace_peers=false", Errno::EINVAL),
            ("allowed_ip=10.0.0.0/8", Errno::EINVAL),
            ("public_key=zz", Errno::EINVAL),
            ("get=1", Errno::EINVAL),
            ("nonsense=1", Errno::EINVAL),
        ];
        let peer: &[(&str, Errno)] = &[
            ("replace_peers=true", Errno::EINVAL),
            ("private_key=00", Errno::EINVAL),
            ("remove=false", Errno::EINVAL),
            ("update_only=1", Errno::EINVAL),
            ("replace_allowed_ips=false", Errno::EINVAL),
            ("preshared_key=", Errno::EINVAL),
            ("protocol_version=2", Errno::EPFNOSUPPORT),
            ("persistent_keepalive_interval=65536", Errno::EINVAL),
            ("persistent_keepalive_interval=off", Errno::EINVAL),
            ("endpoint=192.0.2.1", Errno::EINVAL),
            ("endpoint=192.0.2.1:0", Errno::EINVAL),
            ("endpoint=192.0.2.1:65536", Errno::EINVAL),
            ("endpoint=2001:db8::1:51820", Errno::EINVAL),
            ("endpoint=vpn.example.org:51820", Errno::EINVAL),
            ("endpoint=[fe80::1%nosuch]:5", Errno::EINVAL),
            ("endpoint=[fe80::1%]:5", Errno::EINVAL),
            ("allowed_ip=10.0.0.0", Errno::EINVAL),
            ("allowed_ip=10.0.0.0/33", Errno::EINVAL),
            ("allowed_ip=10.0.0.0/", Errno::EINVAL),
            ("allowed_ip=10.0.0.0/+8", Errno::EINVAL),
            ("allowed_ip=fd00::/129", Errno::EINVAL),
            ("allowed_ip=fd00::/300", Errno::EINVAL),
            ("allowed_ip=--10.0.0.0/8", Errno::EINVAL),
            ("allowed_ip=", Errno::EINVAL),
        ];
        for (line, errno) in device {
            assert_eq!(errno_of(&[line]), Some(*errno), "{line:?}");
        }
        for (line, errno) in peer {
            assert_eq!(errno_of(&[&key, line]), Some(*errno), "{line:?}");
        }
    }

    #[test]
    fn one_bad_line_at_the_end_gives_up_the_whole_request() {
        let error = set(&["listen_port=1", "fwmark=1", "listen_port=x"]).expect_err("bad");
        assert_eq!(error.to_string(), "line 4: listen_port=x: a port is 0 to 65535");
        let mut parser = SetParser::new(&scope);
        parser.line(b"listen_port=x");
        parser.line(b"listen_port=1");
        assert_eq!(parser.finish().expect_err("the first mistake stays").line, 2);
    }

    #[test]
    fn a_request_without_its_end_is_refused() {
        let mut parser = SetParser::new(&scope);
        parser.line(b"listen_port=1");
        parser.cut_short();
        assert_eq!(parser.finish().expect_err("cut").errno, Errno::EPROTO);
    }

    #[test]
    fn lines_up_to_four_kilobytes_are_read_and_longer_ones_refused() {
        let longest = format!("persistent_keepalive_interval={}1", "0".repeat(MAX_LINE - 31));
        assert_eq!(longest.len(), MAX_LINE);
        assert_eq!(peer(&[&longest]).persistent_keepalive, Some(1));
        assert_eq!(errno_of(&[&format!("public_key={KEY}"), &format!("{longest}0")]), Some(Errno::EINVAL));
    }

    #[test]
    fn no_error_text_shows_a_secret() {
        let secret = &KEY[..63];
        for line in [
            format!("private_key={secret}"),
            format!("privat_key={secret}"),
            format!("{secret}="),
            secret.to_owned(),
        ] {
            let text = set(&[&line]).expect_err("bad").to_string();
            assert!(!text.contains(&secret[..16]), "{text}");
        }
        let text =
            set(&[&format!("public_key={OTHER}"), &format!("preshared_key={secret}")]).expect_err("bad");
        assert!(!text.to_string().contains(&secret[..16]), "{text}");
    }

    fn full_snapshot() -> DeviceSnapshot {
        let peer = |key: &str| PeerSnapshot {
            public_key: PublicKey(key_bytes(key)),
            preshared_key: None,
            endpoint: None,
            last_handshake: None,
            tx_bytes: 0,
            rx_bytes: 0,
            persistent_keepalive: 0,
            allowed_ips: Vec::new(),
        };
        DeviceSnapshot {
            private_key: Some(PrivateKey::new(key_bytes(KEY))),
            listen_port: 51820,
            fwmark: 51820,
            peers: vec![
                PeerSnapshot {
                    preshared_key: Some(PresharedKey::new(key_bytes(OTHER))),
                    endpoint: Some("[fe80::1%2]:5".parse().unwrap()),
                    last_handshake: Some(Duration::new(1_700_000_000, 5)),
                    tx_bytes: u64::MAX,
                    rx_bytes: 7,
                    persistent_keepalive: 25,
                    allowed_ips: vec!["10.0.0.0/8".parse().unwrap(), "::/0".parse().unwrap()],
                    ..peer(OTHER)
                },
                peer(KEY),
            ],
        }
    }

    #[test]
    fn a_get_answers_in_the_order_and_form_of_wireguard_go() {
        let clamped = format!("{}48", &KEY[..62]);
        let expected = format!(
            "private_key={clamped}\nlisten_port=51820\nfwmark=51820\n\
             public_key={OTHER}\npreshared_key={OTHER}\nprotocol_version=1\nendpoint=[fe80::1%2]:5\n\
             last_handshake_time_sec=1700000000\nlast_handshake_time_nsec=5\n\
             tx_bytes=18446744073709551615\nrx_bytes=7\npersistent_keepalive_interval=25\n\
             allowed_ip=10.0.0.0/8\nallowed_ip=::/0\n\
             public_key={KEY}\npreshared_key={ZERO}\nprotocol_version=1\n\
             last_handshake_time_sec=0\nlast_handshake_time_nsec=0\n\
             tx_bytes=0\nrx_bytes=0\npersistent_keepalive_interval=0\n\
             errno=0\n\n"
        );
        let answer = get_answer(&full_snapshot());
        assert_eq!(*answer, expected);
        assert_eq!(answer.capacity(), answer.len(), "made in one piece, so that no copy stays behind");
    }

    #[test]
    fn a_device_without_key_and_mark_leaves_both_out() {
        assert_eq!(*get_answer(&DeviceSnapshot::default()), "listen_port=0\nerrno=0\n\n");
    }

    #[test]
    fn an_answer_read_back_says_the_same() {
        let answer = get_answer(&full_snapshot());
        let back = parse_get(&answer, &scope).expect("valid");
        assert_eq!(*get_answer(&back), *answer);
    }

    #[test]
    fn an_answer_that_is_cut_refused_or_garbled_is_an_error() {
        assert_eq!(parse_get("listen_port=1\n", &scope).err(), Some(GetError::CutShort));
        assert_eq!(parse_get("errno=5\n\n", &scope).err(), Some(GetError::Refused(5)));
        assert_eq!(parse_get("listen_port=1\nrubbish\nerrno=0\n", &scope).err(), Some(GetError::Line(2)));
        assert!(parse_get("news=1\nerrno=0\n", &scope).is_ok());
    }

    proptest! {
        #[test]
        fn no_request_makes_the_parser_panic(
            words in prop::collection::vec((0_usize..20, any::<Vec<u8>>(), "[-0-9a-f.:/%\\[\\]]{0,80}"), 0..20)
        ) {
            let mut parser = SetParser::new(&scope);
            for (choice, bytes, text) in words {
                let key = DEVICE_KEYS.iter().chain(&PEER_KEYS).copied().nth(choice);
                match key {
                    Some(key) => parser.line(format!("{key}={text}").as_bytes()),
                    None if choice % 2 == 0 => parser.line(&bytes),
                    None => parser.line(format!("public_key={KEY}").as_bytes()),
                }
            }
            let _ = parser.finish().map_err(|e| e.to_string());
        }

        #[test]
        fn no_answer_makes_the_reader_panic(text in "([a-z_]{0,30}=?[-0-9a-f.:/%\\[\\]]{0,70}\n){0,20}") {
            let _ = parse_get(&text, &scope).map_err(|e| e.to_string());
        }

        #[test]
        fn every_valid_prefix_is_masked(address in any::<u32>(), length in 0_u8..=32) {
            let address = std::net::Ipv4Addr::from(address);
            let p = peer(&[&format!("allowed_ip={address}/{length}")]);
            prop_assert_eq!(p.allowed_ips[0].net, p.allowed_ips[0].net.trunc());
            prop_assert_eq!(p.allowed_ips[0].net.prefix_len(), length);
        }
    }
}
