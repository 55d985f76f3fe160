//! The configuration file of `fv up`, in the format of wg-quick and `wg`: text in, plain data out.
//!
//! All mistakes of a file are reported together, each with its line; a file with a mistake gives nothing.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use forestvpn_quantum::config::{AllowedIp, DeviceUpdate, PeerUpdate};
use forestvpn_quantum::{PresharedKey, PrivateKey, PublicKey};
use ipnet::IpNet;

use crate::key;
use crate::uapi::{shown, shown_keyword};

/// A whole file.
#[derive(Debug)]
pub(crate) struct ConfigFile {
    pub(crate) interface: Interface,
    /// In the order of the file.
    pub(crate) peers: Vec<Peer>,
}

/// The `[Interface]` section.
#[derive(Debug, Default)]
pub(crate) struct Interface {
    pub(crate) private_key: Option<PrivateKey>,
    /// 0 or absent: the kernel chooses.
    pub(crate) listen_port: Option<u16>,
    /// 0 is off.
    pub(crate) fwmark: Option<u32>,
    /// With their host bits; without a length in the file it is the full one.
    pub(crate) addresses: Vec<IpNet>,
    pub(crate) dns_servers: Vec<IpAddr>,
    pub(crate) dns_search: Vec<String>,
    pub(crate) mtu: Option<u16>,
    pub(crate) table: Table,
    pub(crate) pre_up: Vec<Hook>,
    pub(crate) post_up: Vec<Hook>,
    pub(crate) pre_down: Vec<Hook>,
    pub(crate) post_down: Vec<Hook>,
    pub(crate) save_config: bool,
}

/// A shell command of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hook {
    /// `PreUp`, `PostUp`, `PreDown` or `PostDown`.
    pub(crate) key: &'static str,
    /// Its line in the file, counted from 1.
    pub(crate) line: usize,
    /// `%i` is not yet replaced by the name of the interface.
    pub(crate) command: String,
}

/// Where routes to the allowed IPs go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Table {
    /// The main table; a default route goes to a table of its own, with policy rules.
    #[default]
    Auto,
    /// No routes are made.
    Off,
    /// Every route goes to this table.
    Number(u32),
}

/// A `[Peer]` section.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) public_key: PublicKey,
    pub(crate) preshared_key: Option<PresharedKey>,
    /// Absent: the peer has to call first.
    pub(crate) endpoint: Option<Remote>,
    /// Host bits masked, in the order of the file.
    pub(crate) allowed_ips: Vec<IpNet>,
    /// Seconds, 0 is off.
    pub(crate) persistent_keepalive: Option<u16>,
}

/// An endpoint as the file gives it: a name may need a lookup, later and more than once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
    /// Host name or address, without brackets.
    pub(crate) host: String,
    /// 1 to 65535.
    pub(crate) port: u16,
}

impl Remote {
    /// The address, when it is written as one and needs no lookup; IPv4-mapped IPv6 is given as IPv4.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.host.parse().ok().map(|ip: IpAddr| SocketAddr::new(ip.to_canonical(), self.port))
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Everything that is wrong with a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Problems(Vec<(usize, String)>);

impl Problems {
    /// One a line, with the place that `place` makes of a line's number; at most twenty.
    pub(crate) fn told(&self, place: impl Fn(usize) -> String) -> String {
        let mut lines: Vec<_> =
            self.0.iter().take(20).map(|(line, text)| format!("{}: {text}", place(*line))).collect();
        let more = self.0.len().saturating_sub(lines.len());
        if more > 0 {
            lines.push(format!("and {more} more"));
        }
        lines.join("\n")
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.told(|line| format!("line {line}")))
    }
}

impl std::error::Error for Problems {}

impl ConfigFile {
    /// Reads a whole file.
    ///
    /// # Errors
    /// Every mistake with its line, the key, the value (not of secrets) and what is allowed.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Problems> {
        if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
            return Err(Problems(vec![(1, "this file is UTF-16; save it as UTF-8".into())]));
        }
        // Comments may be in any encoding; nothing else may be more than UTF-8, most not more than ASCII.
        let text = String::from_utf8_lossy(bytes);
        let mut reader = Reader::default();
        for (index, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
            reader.line = index.saturating_add(1);
            let content = line.split_once('#').map_or(line, |(before, _)| before).trim();
            if !content.is_empty() {
                reader.content(content);
            }
        }
        reader.finish()
    }

    /// The part that the tunnel itself wants to know. Endpoints that are names are left out: they are looked
    /// up later.
    pub(crate) fn device_update(&self) -> DeviceUpdate {
        DeviceUpdate {
            private_key: Some(self.interface.private_key.clone()),
            listen_port: self.interface.listen_port,
            fwmark: self.interface.fwmark,
            replace_peers: true,
            peers: self.peers.iter().map(Peer::update).collect(),
        }
    }
}

impl Peer {
    fn update(&self) -> PeerUpdate {
        PeerUpdate {
            preshared_key: Some(self.preshared_key.clone()),
            endpoint: self.endpoint.as_ref().and_then(Remote::address),
            persistent_keepalive: self.persistent_keepalive,
            allowed_ips: self.allowed_ips.iter().map(|&net| AllowedIp { net, remove: false }).collect(),
            ..PeerUpdate::new(self.public_key)
        }
    }
}

/// A peer whose section is not read to its end.
#[derive(Default)]
struct Draft {
    line: usize,
    public_key: Option<PublicKey>,
    /// A public key was given, even if it was a bad one that is reported already.
    named: bool,
    preshared_key: Option<PresharedKey>,
    endpoint: Option<Remote>,
    allowed_ips: Vec<IpNet>,
    persistent_keepalive: Option<u16>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Section {
    Interface,
    Peer,
    /// Reported already; its lines are passed over.
    Unknown,
}

#[derive(Default)]
struct Reader {
    line: usize,
    section: Option<Section>,
    interface: Option<Interface>,
    mtu_line: usize,
    peers: Vec<Draft>,
    problems: Vec<(usize, String)>,
}

const INTERFACE_KEYS: [&str; 12] = [
    "PrivateKey",
    "ListenPort",
    "FwMark",
    "Address",
    "DNS",
    "MTU",
    "Table",
    "PreUp",
    "PostUp",
    "PreDown",
    "PostDown",
    "SaveConfig",
];
const PEER_KEYS: [&str; 5] = ["PublicKey", "PresharedKey", "AllowedIPs", "Endpoint", "PersistentKeepalive"];

impl Reader {
    fn problem(&mut self, text: impl Into<String>) {
        self.problems.push((self.line, text.into()));
    }

    fn content(&mut self, content: &str) {
        if let Some(name) = content.strip_prefix('[') {
            return self.section(name.strip_suffix(']').unwrap_or(name).trim());
        }
        if self.section == Some(Section::Unknown) {
            return;
        }
        let Some((name, value)) = content.split_once('=') else {
            let word = content.split_whitespace().next().unwrap_or_default();
            return self.problem(format!("{}: every line is Key = value", shown_keyword(word)));
        };
        let (name, value) = (name.trim(), value.trim());
        let known =
            |keys: &'static [&'static str]| keys.iter().copied().find(|key| key.eq_ignore_ascii_case(name));
        let done = match (self.section, known(&INTERFACE_KEYS), known(&PEER_KEYS)) {
            (Some(Section::Interface), Some(key), _) => self.interface_line(key, value),
            (Some(Section::Peer), _, Some(key)) => self.peer_line(key, value),
            (None, ..) => Err(format!("{}: put [Interface] or [Peer] above it", shown_keyword(name))),
            (_, Some(key), _) => Err(format!("{key} belongs to [Interface], not to [Peer]")),
            (_, _, Some(key)) => Err(format!("{key} belongs to [Peer], not to [Interface]")),
            (Some(Section::Peer), None, None) => Err(unknown(name, &PEER_KEYS)),
            (_, None, None) => Err(unknown(name, &INTERFACE_KEYS)),
        };
        if let Err(text) = done {
            self.problem(text);
        }
    }

    fn section(&mut self, name: &str) {
        self.section = Some(if name.eq_ignore_ascii_case("Interface") {
            self.interface.get_or_insert_default();
            Section::Interface
        } else if name.eq_ignore_ascii_case("Peer") {
            self.peers.push(Draft { line: self.line, ..Draft::default() });
            Section::Peer
        } else {
            self.problem(format!("[{}]: a section is [Interface] or [Peer]", shown_keyword(name)));
            Section::Unknown
        });
    }

    fn interface_line(&mut self, key: &str, value: &str) -> Result<(), String> {
        let line = self.line;
        let to = self.interface.get_or_insert_default();
        match key {
            "PrivateKey" => to.private_key = secret(key, value)?.map(|bytes| PrivateKey::new(*bytes)),
            "ListenPort" => {
                to.listen_port = Some(number(value).ok_or_else(|| bad(key, value, "a port is 0 to 65535"))?)
            }
            "FwMark" => {
                to.fwmark =
                    Some(mark(value).ok_or_else(|| bad(key, value, "off, or a number such as 0xca6c"))?)
            }
            "Address" => to.addresses.extend(list(key, value, address)?),
            "DNS" => {
                for entry in list(key, value, |entry| host(entry).then(|| entry.to_owned()).ok_or(DNS_FORM))?
                {
                    match entry.parse() {
                        Ok(server) => to.dns_servers.push(server),
                        Err(_) => to.dns_search.push(entry),
                    }
                }
            }
            "MTU" => {
                let mtu = number(value).filter(|&mtu| mtu >= 68);
                to.mtu = Some(mtu.ok_or_else(|| bad(key, value, "an MTU is 68 to 65535 bytes"))?);
                self.mtu_line = line;
            }
            "Table" => {
                to.table = match value.to_ascii_lowercase().as_str() {
                    "auto" => Table::Auto,
                    "off" => Table::Off,
                    text => Table::Number(
                        mark(text)
                            .filter(|&table| table != 0)
                            .ok_or_else(|| bad(key, value, "auto, off, or the number of a table"))?,
                    ),
                }
            }
            "PreUp" => to.pre_up.push(hook("PreUp", line, value)?),
            "PostUp" => to.post_up.push(hook("PostUp", line, value)?),
            "PreDown" => to.pre_down.push(hook("PreDown", line, value)?),
            "PostDown" => to.post_down.push(hook("PostDown", line, value)?),
            _ => {
                to.save_config = match value.to_ascii_lowercase().as_str() {
                    "true" => true,
                    "false" => false,
                    _ => return Err(bad("SaveConfig", value, "true or false")),
                }
            }
        }
        Ok(())
    }

    fn peer_line(&mut self, key: &str, value: &str) -> Result<(), String> {
        let Some(to) = self.peers.last_mut() else {
            return Ok(());
        };
        match key {
            "PublicKey" => {
                to.named = true;
                let bytes = key::from_base64(value).ok_or_else(|| bad(key, value, key::FORM))?;
                to.public_key = Some(PublicKey(*bytes));
            }
            "PresharedKey" => to.preshared_key = secret(key, value)?.map(|bytes| PresharedKey::new(*bytes)),
            "AllowedIPs" if value.is_empty() => {}
            "AllowedIPs" => {
                to.allowed_ips.extend(list(key, value, address)?.iter().map(IpNet::trunc));
            }
            "Endpoint" => to.endpoint = Some(remote(value).map_err(|allowed| bad(key, value, allowed))?),
            _ => {
                let seconds = if value.eq_ignore_ascii_case("off") { Some(0) } else { number(value) };
                to.persistent_keepalive = Some(
                    seconds.ok_or_else(|| bad("PersistentKeepalive", value, "off, or 0 to 65535 seconds"))?,
                );
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<ConfigFile, Problems> {
        let interface = self.interface.take().unwrap_or_else(|| {
            self.problem("the file has no [Interface] section");
            Interface::default()
        });
        let ipv6 = interface.addresses.iter().any(|net| net.addr().is_ipv6());
        if let Some(mtu) = interface.mtu.filter(|&mtu| mtu < 1280 && ipv6) {
            self.line = self.mtu_line;
            self.problem(bad("MTU", &mtu.to_string(), "an IPv6 Address needs 1280 or more"));
        }
        let mut peers = Vec::with_capacity(self.peers.len());
        for draft in std::mem::take(&mut self.peers) {
            match draft.public_key {
                Some(public_key) => peers.push(Peer {
                    public_key,
                    preshared_key: draft.preshared_key,
                    endpoint: draft.endpoint,
                    allowed_ips: draft.allowed_ips,
                    persistent_keepalive: draft.persistent_keepalive,
                }),
                None if draft.named => {}
                None => {
                    self.line = draft.line;
                    self.problem("[Peer] has no PublicKey");
                }
            }
        }
        if self.problems.is_empty() {
            return Ok(ConfigFile { interface, peers });
        }
        self.problems.sort_by_key(|(line, _)| *line);
        Err(Problems(self.problems))
    }
}

const DNS_FORM: &str = "DNS is a list of addresses and search domains";

fn bad(key: &str, value: &str, allowed: &str) -> String {
    if value.is_empty() {
        format!("{key} is empty: {allowed}")
    } else {
        format!("{key} = {}: {allowed}", shown(value))
    }
}

fn unknown(name: &str, keys: &[&str]) -> String {
    format!("{} is not known here; known are {}", shown_keyword(name), keys.join(", "))
}

/// All zeros stand for "none", as for `wg`.
fn secret(key: &str, value: &str) -> Result<Option<zeroize::Zeroizing<[u8; 32]>>, String> {
    match key::from_base64(value) {
        Some(bytes) => Ok(Some(bytes).filter(|bytes| bytes.iter().fold(0, |seen, byte| seen | byte) != 0)),
        None if value.is_empty() => Err(format!("{key} is empty: {}, or leave the line out", key::FORM)),
        None => Err(format!("{key} (not shown, {} characters): {}", value.chars().count(), key::FORM)),
    }
}

/// Decimal digits and nothing else.
fn number(value: &str) -> Option<u16> {
    value.bytes().all(|b| b.is_ascii_digit()).then(|| value.parse().ok()).flatten()
}

/// `off`, decimal, or hexadecimal after `0x`.
fn mark(value: &str) -> Option<u32> {
    let lower = value.to_ascii_lowercase();
    match lower.strip_prefix("0x") {
        Some(hex) if hex.bytes().all(|b| b.is_ascii_hexdigit()) => u32::from_str_radix(hex, 16).ok(),
        Some(_) => None,
        None if lower == "off" => Some(0),
        None => lower.bytes().all(|b| b.is_ascii_digit()).then(|| lower.parse().ok()).flatten(),
    }
}

/// The entries between commas, each read by `read`, which gives what is allowed when one is wrong.
fn list<T>(key: &str, value: &str, read: impl Fn(&str) -> Result<T, &'static str>) -> Result<Vec<T>, String> {
    value
        .split(',')
        .map(|entry| read(entry.trim()).map_err(|allowed| bad(key, entry.trim(), allowed)))
        .collect()
}

/// An address with or without a prefix length.
fn address(text: &str) -> Result<IpNet, &'static str> {
    let (ip, length) = text.split_once('/').map_or((text, None), |(ip, length)| (ip, Some(length)));
    let ip: IpAddr = ip.parse().map_err(|_| "an entry is 10.0.0.1/24 or fd00::1/64")?;
    let Some(length) = length else {
        return Ok(IpNet::from(ip));
    };
    let limit = if ip.is_ipv4() { "the length is 0 to 32" } else { "the length is 0 to 128" };
    let length = number(length).and_then(|length| u8::try_from(length).ok());
    length.and_then(|length| IpNet::new(ip, length).ok()).ok_or(limit)
}

fn hook(key: &'static str, line: usize, value: &str) -> Result<Hook, String> {
    if value.is_empty() {
        return Err(bad(key, value, "a shell command"));
    }
    Ok(Hook { key, line, command: value.to_owned() })
}

/// Letters, digits and the few signs that names and addresses have.
fn host(text: &str) -> bool {
    (1..=253).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_' | b':' | b'%'))
}

fn remote(value: &str) -> Result<Remote, &'static str> {
    const FORM: &str = "host:port, such as vpn.example.org:51820, 192.0.2.1:51820 or [2001:db8::1]:51820";
    let (name, port) = value.rsplit_once(':').ok_or(FORM)?;
    let port = number(port).filter(|&port| port != 0).ok_or("the port after the last : is 1 to 65535")?;
    if let Some(inner) = name.strip_prefix('[') {
        let inner = inner.strip_suffix(']').ok_or(FORM)?;
        let (ip, scope) = inner.split_once('%').unwrap_or((inner, "x"));
        let good = ip.parse::<Ipv6Addr>().is_ok() && host(scope);
        return good
            .then(|| Remote { host: inner.to_owned(), port })
            .ok_or("there is no IPv6 address in the brackets");
    }
    if name.contains(':') {
        return Err("an IPv6 address stands in brackets: [2001:db8::1]:51820");
    }
    let numeric = name.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    if !host(name) || name.contains('%') || numeric && name.parse::<IpAddr>().is_err() {
        return Err(FORM);
    }
    Ok(Remote { host: name.to_owned(), port })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: &str = "AKeZaHwBxjiKLFnkY2unvEdOTtg4AL+M9dQXfopFVFk=";
    const PUBLIC: &str = "/gge9KzRytKNwrgkzDE/8hrLu6Ly0OqVdvOPWhA5KR4=";

    fn parse(text: &str) -> Result<ConfigFile, Problems> {
        ConfigFile::parse(text.as_bytes())
    }

    fn interface(lines: &str) -> Result<Interface, Problems> {
        parse(&format!("[Interface]\n{lines}\n")).map(|file| file.interface)
    }

    fn peer(lines: &str) -> Result<Peer, Problems> {
        let mut file = parse(&format!("[Interface]\n[Peer]\nPublicKey = {PUBLIC}\n{lines}\n"))?;
        Ok(file.peers.pop().expect("one peer"))
    }

    fn nets(nets: &[IpNet]) -> Vec<String> {
        nets.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_full_file_is_read() {
        let file = parse(&format!(
            "[Interface]\nPrivateKey = {KEY}\nListenPort = 51820\nFwMark = 0xCA6C\n\
             Address = 10.0.0.2/24, fd00::2/64\nAddress = 10.9.9.9\nDNS = 10.0.0.1, fd00::1, example.org\n\
             MTU = 1300\nTable = 1234\nPreUp = echo one; echo two\nPostUp = a = b\nPostUp = c %i\n\
             PreDown = d\nPostDown = e\nSaveConfig = false\n\n\
             [Peer]\nPublicKey = {PUBLIC}\nPresharedKey = {KEY}\nAllowedIPs = 10.0.0.7/24\n\
             Endpoint = vpn.example.org:51820\nPersistentKeepalive = 25\n"
        ))
        .expect("valid");
        let i = &file.interface;
        assert_eq!(i.private_key, Some(PrivateKey::new(*key::from_base64(KEY).unwrap())));
        assert_eq!((i.listen_port, i.fwmark, i.mtu), (Some(51820), Some(0xca6c), Some(1300)));
        assert_eq!(nets(&i.addresses), ["10.0.0.2/24", "fd00::2/64", "10.9.9.9/32"]);
        assert_eq!(i.dns_servers, ["10.0.0.1".parse::<IpAddr>().unwrap(), "fd00::1".parse().unwrap()]);
        assert_eq!(i.dns_search, ["example.org"]);
        assert_eq!(i.table, Table::Number(1234));
        let hooks: Vec<_> =
            [&i.pre_up, &i.post_up, &i.pre_down, &i.post_down].into_iter().flatten().collect();
        assert_eq!(
            hooks.iter().map(|hook| (hook.key, &*hook.command)).collect::<Vec<_>>(),
            [
                ("PreUp", "echo one; echo two"),
                ("PostUp", "a = b"),
                ("PostUp", "c %i"),
                ("PreDown", "d"),
                ("PostDown", "e")
            ]
        );
        assert!(!i.save_config);
        let p = &file.peers[0];
        assert_eq!(key::public_text(&p.public_key), PUBLIC);
        assert_eq!(p.preshared_key, Some(PresharedKey::new(*key::from_base64(KEY).unwrap())));
        assert_eq!(nets(&p.allowed_ips), ["10.0.0.0/24"]);
        assert_eq!(p.endpoint.as_ref().map(ToString::to_string).as_deref(), Some("vpn.example.org:51820"));
        assert_eq!(p.persistent_keepalive, Some(25));
    }

    #[test]
    fn f80_an_empty_preshared_key_is_an_error_with_its_line() {
        let text = peer("PresharedKey=").expect_err("empty").to_string();
        assert!(text.starts_with("line 4: PresharedKey is empty"), "{text}");
    }

    #[test]
    fn f81_several_allowed_ips_lines_are_joined_and_an_empty_one_is_nothing() {
        let p =
            peer("AllowedIPs = 10.0.0.0/8\nAllowedIPs = fd00::/8, 192.0.2.1\nAllowedIPs =").expect("valid");
        assert_eq!(nets(&p.allowed_ips), ["10.0.0.0/8", "fd00::/8", "192.0.2.1/32"]);
    }

    #[test]
    fn f82_spaces_tabs_line_ends_and_a_byte_order_mark_make_no_difference() {
        for text in [
            format!("[Interface]\n[Peer]\nPublicKey={PUBLIC}\nEndpoint=1.2.3.4:1"),
            format!("\u{feff}[Interface]\r\n[Peer]\r\nPublicKey={PUBLIC}\r\nEndpoint=1.2.3.4:1\r\n"),
            format!(" [ Interface ]\n\t[Peer]\t\n\tPublicKey\t=\t{PUBLIC}\t\n Endpoint = 1.2.3.4:1  "),
        ] {
            let file = parse(&text).expect("valid");
            let endpoint = file.peers[0].endpoint.as_ref().and_then(Remote::address);
            assert_eq!(endpoint, Some("1.2.3.4:1".parse().unwrap()), "{text:?}");
        }
    }

    #[test]
    fn f83_comments_are_dropped_anywhere_and_make_no_ghost_peer() {
        let text = format!(
            "# top\n[Interface] # mine\nListenPort = 1 # port\nPostUp = x # y\n#[Peer]\n#PublicKey = {PUBLIC}\n"
        );
        let file = parse(&text).expect("valid");
        assert_eq!(file.interface.listen_port, Some(1));
        assert_eq!(file.interface.post_up, [Hook { key: "PostUp", line: 4, command: "x".to_owned() }]);
        assert!(file.peers.is_empty());
        let mut latin1 = b"# M\xfcller\n".to_vec();
        latin1.extend(text.bytes());
        assert!(ConfigFile::parse(&latin1).is_ok());
    }

    #[test]
    fn f84_keywords_are_read_in_any_case_and_keys_keep_theirs() {
        let file =
            parse(&format!("[INTERFACE]\nlistenport=7\n[pEER]\nPublickey = {PUBLIC}\nALLOWEDIPS=::/0\n"));
        let file = file.expect("valid");
        assert_eq!(file.interface.listen_port, Some(7));
        assert_eq!(key::public_text(&file.peers[0].public_key), PUBLIC);
    }

    #[test]
    fn f85_a_peer_without_an_endpoint_is_valid() {
        let file = parse(&format!("[Interface]\n[Peer]\nPublicKey = {PUBLIC}\n")).expect("valid");
        assert!(file.peers[0].endpoint.is_none());
    }

    #[test]
    fn values_that_mean_off_or_nothing_are_read() {
        assert_eq!(interface("FwMark = off").expect("valid").fwmark, Some(0));
        assert_eq!(interface("Table = OFF").expect("valid").table, Table::Off);
        assert_eq!(interface("Table = auto").expect("valid").table, Table::Auto);
        assert_eq!(peer("PersistentKeepalive = off").expect("valid").persistent_keepalive, Some(0));
        let zero = format!("PrivateKey = {}=", "A".repeat(43));
        assert!(interface(&zero).expect("valid").private_key.is_none());
    }

    #[test]
    fn endpoints_keep_their_host_as_it_is_written() {
        for (text, host, address) in [
            ("192.0.2.1:5", "192.0.2.1", Some("192.0.2.1:5")),
            ("[2001:DB8::1]:5", "2001:DB8::1", Some("[2001:db8::1]:5")),
            ("[::ffff:192.0.2.1]:5", "::ffff:192.0.2.1", Some("192.0.2.1:5")),
            ("[fe80::1%eth0]:5", "fe80::1%eth0", None),
            ("a-b.example.org:5", "a-b.example.org", None),
        ] {
            let endpoint = peer(&format!("Endpoint = {text}")).expect(text).endpoint.expect(text);
            assert_eq!(endpoint.host, host);
            assert_eq!(endpoint.address(), address.map(|a| a.parse().unwrap()));
            assert_eq!(endpoint.to_string(), text);
        }
    }

    #[test]
    fn a_bad_line_is_reported_with_line_key_value_and_what_is_allowed() {
        for (line, expected) in [
            ("ListenPort = 65536", "line 2: ListenPort = 65536: a port is 0 to 65535"),
            ("ListenPort =", "line 2: ListenPort is empty: a port is 0 to 65535"),
            ("FwMark = 0xfffffffff", "line 2: FwMark = 0xfffffffff: off, or a number such as 0xca6c"),
            ("Address = 10.0.0.1/33", "line 2: Address = 10.0.0.1/33: the length is 0 to 32"),
            ("Address = fd00::1/129", "line 2: Address = fd00::1/129: the length is 0 to 128"),
            ("Address = 10.0.0.1,", "line 2: Address is empty: an entry is 10.0.0.1/24 or fd00::1/64"),
            ("DNS = a b", "line 2: DNS = a b: DNS is a list of addresses and search domains"),
            ("MTU = 67", "line 2: MTU = 67: an MTU is 68 to 65535 bytes"),
            ("MTU = 65536", "line 2: MTU = 65536: an MTU is 68 to 65535 bytes"),
            ("Table = main", "line 2: Table = main: auto, off, or the number of a table"),
            ("SaveConfig = yes", "line 2: SaveConfig = yes: true or false"),
            ("PostUp =", "line 2: PostUp is empty: a shell command"),
            ("Endpoint = 1.2.3.4:1", "line 2: Endpoint belongs to [Peer], not to [Interface]"),
            ("ListenPort 51820", "line 2: ListenPort: every line is Key = value"),
            ("[Pear]", "line 2: [Pear]: a section is [Interface] or [Peer]"),
            ("[Peer]", "line 2: [Peer] has no PublicKey"),
            ("\nMTU = 1279\nAddress = fd00::1", "line 3: MTU = 1279: an IPv6 Address needs 1280 or more"),
        ] {
            assert_eq!(interface(line).expect_err(line).to_string(), expected);
        }
        for (line, expected) in [
            ("PersistentKeepalive = 65536", "PersistentKeepalive = 65536: off, or 0 to 65535 seconds"),
            ("AllowedIPs = 10.0.0.0/8, x", "AllowedIPs = x: an entry is 10.0.0.1/24 or fd00::1/64"),
            ("PublicKey = x", "PublicKey = x: a key is 44 base64 characters, the last of them '='"),
            ("ListenPort = 1", "ListenPort belongs to [Interface], not to [Peer]"),
            ("Endpoint = 1.2.3.4:0", "Endpoint = 1.2.3.4:0: the port after the last : is 1 to 65535"),
            ("Endpoint = 1.2.3.4", "Endpoint = 1.2.3.4: host:port, such as"),
            ("Endpoint = 1.2.3:5", "Endpoint = 1.2.3:5: host:port, such as"),
            ("Endpoint = 1::2:5", "Endpoint = 1::2:5: an IPv6 address stands in brackets"),
            ("Endpoint = [1.2.3.4]:5", "Endpoint = [1.2.3.4]:5: there is no IPv6 address in the brackets"),
            ("Endpoint = a b:5", "Endpoint = a b:5: host:port, such as"),
        ] {
            let text = peer(line).expect_err(line).to_string();
            assert!(text.starts_with(&format!("line 4: {expected}")), "{text}");
        }
    }

    #[test]
    fn an_unknown_key_is_answered_with_the_known_ones() {
        let text = interface("Adress = 10.0.0.1").expect_err("typo").to_string();
        assert!(text.starts_with("line 2: Adress is not known here; known are PrivateKey, "), "{text}");
    }

    #[test]
    fn all_mistakes_are_reported_at_once_in_the_order_of_the_file() {
        let text = parse("ListenPort = 1\n[Peer]\nEndpoint = x\n[Peer]\nPublicKey = y\n")
            .expect_err("bad")
            .to_string();
        let lines: Vec<_> = text.lines().map(|line| line.split(':').next().unwrap_or_default()).collect();
        assert_eq!(lines, ["line 1", "line 2", "line 3", "line 5", "line 5"], "{text}");
        assert!(text.ends_with("the file has no [Interface] section"), "{text}");
        let many = parse(&format!("[Interface]\n{}", "x\n".repeat(50))).expect_err("bad").to_string();
        assert!(many.ends_with("and 30 more") && many.lines().count() == 21, "{many}");
    }

    #[test]
    fn no_message_shows_a_secret() {
        for lines in [
            format!("PrivateKey = {}", &KEY[..43]),
            format!("PrivteKey = {KEY}x"),
            format!("PrivateKey {KEY}"),
            KEY.to_owned(),
        ] {
            let text = interface(&lines).expect_err("bad").to_string();
            assert!(!text.contains("AKeZaHwB"), "{text}");
        }
    }

    #[test]
    fn utf16_is_named_as_the_cause() {
        let text = ConfigFile::parse(b"\xff\xfe[\0I\0").expect_err("utf-16").to_string();
        assert!(text.contains("UTF-16"), "{text}");
    }

    #[test]
    fn the_update_of_a_file_leaves_names_for_later_and_keeps_addresses() {
        let file = parse(&format!(
            "[Interface]\n[Peer]\nPublicKey={PUBLIC}\nEndpoint=a.example:1\n[Peer]\nPublicKey={KEY}\nEndpoint=[::1]:2"
        ))
        .expect("valid");
        let update = file.device_update();
        assert!(update.replace_peers);
        let endpoints: Vec<_> = update.peers.iter().map(|p| p.endpoint).collect();
        assert_eq!(endpoints, [None, Some("[::1]:2".parse().unwrap())]);
    }

    proptest! {
        #[test]
        fn no_file_makes_the_reader_panic(
            lines in prop::collection::vec((0_usize..24, "[-0-9a-zA-Z.:/%, =#\\[\\]\u{e9}]{0,60}", any::<Vec<u8>>()), 0..20)
        ) {
            let mut file = Vec::new();
            for (choice, text, bytes) in lines {
                match INTERFACE_KEYS.iter().chain(&PEER_KEYS).copied().nth(choice) {
                    Some(key) => file.extend(format!("{key}={text}").bytes()),
                    None if choice < 20 => file.extend(b"[Interface]"),
                    None if choice < 22 => file.extend(b"[Peer]"),
                    None => file.extend(&bytes),
                }
                file.push(b'\n');
            }
            let _ = ConfigFile::parse(&file).map_err(|e| e.to_string());
        }
    }
}
